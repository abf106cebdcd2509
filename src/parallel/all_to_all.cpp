// S -> S.
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct AllToAll : Transition {
  AllToAll(const Axis& over, Splits rows, std::string name)
      : Transition("all_to_all", over, std::move(name)), splits(std::move(rows)) {}

  at::Tensor forward(const at::Tensor& rows) const override {
    return exchange_rows(rows, axis, splits, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_rows(grad, axis, splits.swapped(), where + " backward");
  }

  const Splits splits;
};

}  // namespace

at::Tensor all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                      const std::string& where) {
  return axis.alone() ? rows : apply<AllToAll>(rows, axis, splits, where);
}

}  // namespace tessera::parallel
