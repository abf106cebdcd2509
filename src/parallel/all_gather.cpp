// S -> R and S -> I.
#include "parallel/slices.h"
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct AllGather : Transition {
  AllGather(const Axis& over, const Cut& how, To placement, std::string name)
      : Transition("all_gather", over, std::move(name)), cut(how), to(placement) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_gather(x, axis, cut, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (to == To::kInvariant) return own_part(grad, axis, cut.dim);
    return exchange_reduce_scatter(grad, axis, cut, std::nullopt, where + " backward");
  }

  const Cut cut;
  const To to;
};

}  // namespace

at::Tensor all_gather(const at::Tensor& x, const Axis& axis, const Cut& cut, To to,
                      const std::string& where) {
  return axis.alone() ? x : apply<AllGather>(x, axis, cut, to, where);
}

}  // namespace tessera::parallel
