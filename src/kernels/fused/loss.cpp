// Cross entropy in blocks of rows, so that nothing as large as the logits is made in fp32.
#include <ATen/ops/elu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/sub.h>

#include <algorithm>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::fused {
namespace {

constexpr std::int64_t kIgnored = -100;

/// Logits [B, T, V] as rows, and their targets.
class Rows {
 public:
  Rows(const at::Tensor& logits, const at::Tensor& targets)
      : inside(at::promote_types(logits.scalar_type(), at::kFloat)),
        kept(targets.reshape({-1}).ne(kIgnored)),
        target(targets.reshape({-1}).mul(kept)),  // an ignored one is compared with token 0
        logits_(logits.reshape({target.numel(), logits.size(2)})) {}

  /// Calls body(begin, count, logits of these rows).
  template <class Body>
  void in_blocks(const Body& body) const {
    const std::int64_t rows = target.numel();
    const std::int64_t step = rows_of_loss(logits_);
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const std::int64_t count = std::min(step, rows - begin);
      body(begin, count, logits_.narrow(0, begin, count));
    }
  }

  const at::ScalarType inside;
  const at::Tensor kept;    ///< [rows] bool
  const at::Tensor target;  ///< [rows]

 private:
  const at::Tensor logits_;
};

/// Writes (softmax - 1 at the target) * grad, and 0 for ignored rows. Two passes over the logits:
/// log p, as wide as the loss, and factor * p, which rounds once. Writes: result [B, T, V], which
/// may be the logits.
void write_gradient(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                    const at::Tensor& log_sum, const at::Tensor& result) {
  const Rows rows(logits, targets);
  const at::Tensor to = result.view({rows.target.numel(), logits.size(2)});
  const at::Tensor factor = (rows.kept * grad).to(rows.inside);
  const at::Tensor log_sums = log_sum.reshape({-1});
  rows.in_blocks([&](std::int64_t begin, std::int64_t count, const at::Tensor& block) {
    const auto part = [&](const at::Tensor& of) { return of.narrow(0, begin, count).unsqueeze(1); };
    const at::Tensor log_p = at::sub(block, part(log_sums));
    const at::Tensor of_target = log_p.gather(1, part(rows.target)).expm1_().mul_(part(factor));
    at::Tensor rounded = to.narrow(0, begin, count);
    // For x <= 0 this is factor * exp(x) in one pass; above 0 (by rounding, no more) the factor.
    at::elu_backward_out(rounded, part(factor), /*alpha=*/1, /*scale=*/1, /*input_scale=*/1,
                         /*is_result=*/false, log_p);
    rounded.scatter_(1, part(rows.target), of_target.to(rounded.scalar_type()));
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets) {
  const WideScope loss;
  const Rows rows(logits, targets);
  const auto options = logits.options().dtype(rows.inside);
  const at::Tensor log_p = at::empty({rows.target.numel(), 1}, options);  // of the targets
  const at::Tensor log_sum = at::empty_like(log_p);
  rows.in_blocks([&](std::int64_t begin, std::int64_t count, const at::Tensor& block) {
    const at::Tensor target = rows.target.narrow(0, begin, count).unsqueeze(1);
    at::Tensor found = log_p.narrow(0, begin, count), rest = log_sum.narrow(0, begin, count);
    const at::Tensor of_all = at::log_softmax(block.to(rows.inside), 1);
    at::gather_out(found, of_all, 1, target);
    // Where it is largest the logarithm is small, so that their difference has all digits.
    const auto [largest, place] = of_all.max(1, /*keepdim=*/true);
    at::sub_out(rest, block.gather(1, place), largest);
  });
  const at::Tensor sum = log_p.squeeze(1).masked_fill(rows.kept.logical_not(), 0).sum(at::kDouble);
  return {sum.mul(-1.0).to(rows.inside), log_sum.view(targets.sizes())};
}

at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum) {
  const at::Tensor result = at::empty_like(logits);
  write_gradient(grad, logits, targets, log_sum, result);
  return result;
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits) {
  write_gradient(grad, logits, targets, log_sum, logits);
}

}  // namespace tessera::kernels::fused
