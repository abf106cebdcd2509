// P -> S.
#include "parallel/slices.h"
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct ReduceScatter : Transition {
  ReduceScatter(const Axis& over, const Cut& how, std::string name, SumDtype dtype,
                at::ScalarType own)
      : Transition("reduce_scatter", over, std::move(name)), cut(how), result(dtype), input(own) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_reduce_scatter(x, axis, cut, result, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_gather(grad.to(input), axis, cut, where + " backward");
  }

  const Cut cut;
  const SumDtype result;
  const at::ScalarType input;
};

}  // namespace

at::Tensor reduce_scatter(const at::Tensor& x, const Axis& axis, const Cut& cut,
                          const std::string& where, SumDtype result) {
  if (axis.alone()) return x.to(result.value_or(x.scalar_type()));
  const Cut whole{cut.dim, whole_of(x, axis, cut, where)};
  return apply<ReduceScatter>(x, axis, whole, where, result, x.scalar_type());
}

}  // namespace tessera::parallel
