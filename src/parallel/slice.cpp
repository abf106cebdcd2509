// I -> S and R -> S.
#include "parallel/slices.h"
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct Slice : Transition {
  Slice(const Axis& over, const Cut& how, From placement, std::string name)
      : Transition("slice", over, std::move(name)), cut(how), from(placement) {}

  at::Tensor forward(const at::Tensor& x) const override { return own_part(x, axis, cut.dim); }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (from == From::kReplicate) return in_zeros(grad, axis, cut.dim, *cut.total);
    return exchange_gather(grad, axis, cut, where + " backward");
  }

  const Cut cut;
  const From from;
};

}  // namespace

at::Tensor slice(const at::Tensor& x, const Axis& axis, const Cut& cut, From from,
                 const std::string& where) {
  if (axis.alone()) return x;
  return apply<Slice>(x, axis, Cut{cut.dim, whole_of(x, axis, cut, where)}, from, where);
}

}  // namespace tessera::parallel
