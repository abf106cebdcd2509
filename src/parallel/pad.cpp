// S -> P.
#include "parallel/slices.h"
#include "parallel/transition.h"
#include "parallel/transitions.h"

namespace tessera::parallel {
namespace {

struct Pad : Transition {
  Pad(const Axis& over, std::int64_t of, std::int64_t whole, std::string name)
      : Transition("pad", over, std::move(name)), dim(of), total(whole) {}

  at::Tensor forward(const at::Tensor& x) const override { return in_zeros(x, axis, dim, total); }
  at::Tensor backward(const at::Tensor& grad) const override { return own_part(grad, axis, dim); }

  const std::int64_t dim;
  const std::int64_t total;
};

}  // namespace

at::Tensor pad(const at::Tensor& x, const Axis& axis, const Cut& cut, const std::string& where) {
  if (axis.alone()) return x;
  const std::int64_t own = x.size(cut.dim);
  const std::int64_t total = cut.total.value_or(own * axis.size);
  check_part(x, own, axis, cut.dim, total, where);
  return apply<Pad>(x, axis, cut.dim, total, where);
}

}  // namespace tessera::parallel
