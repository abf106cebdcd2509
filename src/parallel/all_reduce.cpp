// P -> R and P -> I.
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct AllReduce : Transition {
  AllReduce(const Axis& over, To placement, std::string name, SumDtype dtype, at::ScalarType own)
      : Transition("all_reduce", over, std::move(name)), to(placement), result(dtype), input(own) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_sum(x, axis, result, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (to == To::kInvariant) return grad.to(input);
    return exchange_sum(grad, axis, input, where + " backward");
  }

  const To to;
  const SumDtype result;
  const at::ScalarType input;
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& x, const Axis& axis, To to, const std::string& where,
                      SumDtype result) {
  if (axis.alone()) return x.to(result.value_or(x.scalar_type()));
  return apply<AllReduce>(x, axis, to, where, result, x.scalar_type());
}

}  // namespace tessera::parallel
