// R -> P.
#include <ATen/ops/zeros_like.h>

#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct OnlyFirst : Transition {
  explicit OnlyFirst(int own) : rank(own) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return rank == 0 ? x : at::zeros_like(x);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return rank == 0 ? grad : at::zeros_like(grad);
  }

  const int rank;
};

}  // namespace

at::Tensor only_first(const at::Tensor& x, const Axis& axis) {
  return axis.alone() ? x : apply<OnlyFirst>(x, axis.rank);
}

}  // namespace tessera::parallel
