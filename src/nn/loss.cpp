#include "nn/loss.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full_like.h>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

void check_targets(const at::Tensor& logits, const at::Tensor& targets) {
  TESSERA_CHECK(logits.dim() == 3 && targets.dim() == 2 && logits.size(0) == targets.size(0) &&
                    logits.size(1) == targets.size(1),
                ErrorKind::kFormat, "loss: found logits ", logits.sizes(), " and targets ",
                targets.sizes(), ", expected [B, T, V] and [B, T]");
  if (targets.numel() == 0) return;
  const at::Tensor bad =
      targets.ne(kIgnoredLabel).logical_and(targets.lt(0).logical_or(targets.ge(logits.size(2))));
  TESSERA_CHECK(!bad.any().item<bool>(), ErrorKind::kFormat, "loss: found the label ",
                targets.masked_select(bad)[0].item<std::int64_t>(), ", expected 0 to ",
                logits.size(2) - 1, " or ", kIgnoredLabel);
}

}  // namespace

at::Tensor next_token_targets(const at::Tensor& labels) {
  auto targets = at::full_like(labels, kIgnoredLabel);
  if (labels.numel() > 0) {
    const auto last = labels.size(1) - 1;
    targets.narrow(1, 0, last).copy_(labels.narrow(1, 1, last));
  }
  return targets;
}

std::int64_t count_kept(const at::Tensor& targets) {
  return targets.numel() == 0 ? 0 : targets.ne(kIgnoredLabel).sum().item<std::int64_t>();
}

at::Tensor cross_entropy_sum_composite(const at::Tensor& logits, const at::Tensor& targets) {
  const WideScope loss;
  const std::int64_t vocabulary = logits.size(2);
  const at::ScalarType inside = at::promote_types(logits.scalar_type(), at::kFloat);
  const std::int64_t rows = logits.size(0) * logits.size(1);
  return at::cross_entropy_loss(logits.to(inside).reshape({rows, vocabulary}),
                                targets.reshape({rows}), /*weight=*/{}, at::Reduction::Sum,
                                kIgnoredLabel);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, Logits use) {
  check_targets(logits, targets);
  return cpu::has_kernels(logits) ? cpu::cross_entropy_sum(logits, targets, use)
                                  : cross_entropy_sum_composite(logits, targets);
}

}  // namespace tessera::nn
