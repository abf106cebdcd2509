// R -> P.
#include <ATen/ops/zeros_like.h>

#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct OnlyFirst : Transition {
  explicit OnlyFirst(const Axis& over) : Transition("only_first", over, "only first") {}

  at::Tensor forward(const at::Tensor& x) const override {
    return axis.rank == 0 ? x : at::zeros_like(x);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return axis.rank == 0 ? grad : at::zeros_like(grad);
  }
};

}  // namespace

at::Tensor only_first(const at::Tensor& x, const Axis& axis) {
  return axis.alone() ? x : apply<OnlyFirst>(x, axis);
}

}  // namespace tessera::parallel
