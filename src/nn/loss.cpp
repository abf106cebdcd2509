#include "nn/loss.h"

#include <ATen/ops/cross_entropy_loss.h>

#include "tessera/error.h"

namespace tessera::nn {
namespace {

/// labels[t+1] at position t; the last position has none.
at::Tensor next_labels(const at::Tensor& labels) {
  return labels.narrow(1, 1, labels.size(1) - 1);
}

void check_labels(const at::Tensor& logits, const at::Tensor& labels) {
  TESSERA_CHECK(logits.dim() == 3 && labels.dim() == 2 && logits.size(0) == labels.size(0) &&
                    logits.size(1) == labels.size(1) && labels.size(1) > 0,
                ErrorKind::kFormat, "loss: found logits ", logits.sizes(), " and labels ",
                labels.sizes(), ", expected [B, T, V] and [B, T]");
  if (labels.numel() == 0) return;
  const at::Tensor used = next_labels(labels);
  const at::Tensor bad = used.ne(kIgnoredLabel).logical_and(used.lt(0).logical_or(
      used.ge(logits.size(2))));
  TESSERA_CHECK(!bad.any().item<bool>(), ErrorKind::kFormat, "loss: found the label ",
                used.masked_select(bad)[0].item<std::int64_t>(), ", expected 0 to ",
                logits.size(2) - 1, " or ", kIgnoredLabel);
}

}  // namespace

std::int64_t count_kept(const at::Tensor& labels) {
  if (labels.numel() == 0) return 0;
  return next_labels(labels).ne(kIgnoredLabel).sum().item<std::int64_t>();
}

at::Tensor cross_entropy_sum_composite(const at::Tensor& logits, const at::Tensor& labels) {
  const std::int64_t vocabulary = logits.size(2);
  const at::Tensor predicting = logits.narrow(1, 0, logits.size(1) - 1);
  const at::ScalarType inside = at::promote_types(logits.scalar_type(), at::kFloat);
  const std::int64_t rows = predicting.size(0) * predicting.size(1);
  return at::cross_entropy_loss(predicting.to(inside).reshape({rows, vocabulary}),
                                next_labels(labels).reshape({rows}), /*weight=*/{},
                                at::Reduction::Sum, kIgnoredLabel);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels, Logits /*use*/) {
  check_labels(logits, labels);
  return cross_entropy_sum_composite(logits, labels);
}

}  // namespace tessera::nn
