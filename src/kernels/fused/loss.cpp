// Cross entropy in blocks of rows, so that nothing as large as the logits is made in fp32.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/softmax.h>

#include <algorithm>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::fused {
namespace {

constexpr std::int64_t kIgnored = -100;

/// Logits [B, T, V] as rows, and what they are compared with.
class Rows {
 public:
  Rows(const at::Tensor& logits, const at::Tensor& targets)
      : inside(at::promote_types(logits.scalar_type(), at::kFloat)),
        kept(targets.reshape({-1}).ne(kIgnored)),
        target(targets.reshape({-1}).mul(kept)),  // an ignored one is compared with token 0
        logits_(logits.reshape({target.numel(), logits.size(2)})) {}

  /// body(begin, count, logits of these rows as wide as the loss).
  template <class Body>
  void in_blocks(const Body& body) const {
    const std::int64_t rows = target.numel();
    const std::int64_t step = rows_of_loss(logits_);
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const std::int64_t count = std::min(step, rows - begin);
      body(begin, count, logits_.narrow(0, begin, count).to(inside));
    }
  }

  const at::ScalarType inside;
  const at::Tensor kept;    ///< [rows] bool
  const at::Tensor target;  ///< [rows]

 private:
  const at::Tensor logits_;
};

/// Writes: result [B, T, V], which may be the logits.
void write_gradient(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                    const at::Tensor& result) {
  const Rows rows(logits, targets);
  const at::Tensor to = result.view({rows.target.numel(), logits.size(2)});
  const at::Tensor factor = (rows.kept * grad).to(rows.inside);
  const at::Tensor of_target = factor.neg();
  rows.in_blocks([&](std::int64_t begin, std::int64_t count, const at::Tensor& wide) {
    const auto part = [&](const at::Tensor& of) { return of.narrow(0, begin, count).unsqueeze(1); };
    const at::Tensor values = at::softmax(wide, 1).mul_(part(factor));
    values.scatter_add_(1, part(rows.target), part(of_target));
    to.narrow(0, begin, count).copy_(values);
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets) {
  const WideScope loss;
  const Rows rows(logits, targets);
  const auto options = logits.options().dtype(rows.inside);
  const at::Tensor log_p = at::empty({rows.target.numel(), 1}, options);  // of the targets
  rows.in_blocks([&](std::int64_t begin, std::int64_t count, const at::Tensor& wide) {
    at::Tensor found = log_p.narrow(0, begin, count);
    at::gather_out(found, at::log_softmax(wide, 1), 1,
                   rows.target.narrow(0, begin, count).unsqueeze(1));
  });
  const at::Tensor sum = log_p.squeeze(1).masked_fill(rows.kept.logical_not(), 0).sum(at::kDouble);
  return {sum.mul(-1.0).to(rows.inside), at::empty({0}, options)};
}

at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& /*log_sum*/) {
  const at::Tensor result = at::empty_like(logits);
  write_gradient(grad, logits, targets, result);
  return result;
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& /*log_sum*/, const at::Tensor& logits) {
  write_gradient(grad, logits, targets, logits);
}

}  // namespace tessera::kernels::fused
