// I -> R.
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct Copy : Transition {
  Copy(const Axis& over, std::string name) : Transition("copy", over, std::move(name)) {}

  at::Tensor forward(const at::Tensor& x) const override { return x; }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_sum(grad, axis, std::nullopt, where + " backward");
  }
};

}  // namespace

at::Tensor copy(const at::Tensor& x, const Axis& axis, const std::string& where) {
  return axis.alone() ? x : apply<Copy>(x, axis, where);
}

}  // namespace tessera::parallel
