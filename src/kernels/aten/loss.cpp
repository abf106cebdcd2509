#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/zeros.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::aten {
namespace {

constexpr std::int64_t kIgnored = -100;

/// Returns [B*T, V], as wide as the loss.
at::Tensor log_probabilities(const at::Tensor& logits) {
  const at::ScalarType inside = at::promote_types(logits.scalar_type(), at::kFloat);
  return at::log_softmax(
      logits.to(inside).reshape({logits.size(0) * logits.size(1), logits.size(2)}), 1);
}

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t padding) {
  return at::embedding(weight, ids, padding);
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& ids, std::int64_t rows,
                              std::int64_t padding) {
  return at::embedding_dense_backward(grad, ids, rows, padding, /*scale_grad_by_freq=*/false);
}

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets) {
  const WideScope loss;
  const at::Tensor log_p = log_probabilities(logits);
  return {at::nll_loss(log_p, targets.reshape({targets.numel()}), /*weight=*/{}, at::Reduction::Sum,
                       kIgnored),
          at::empty({0}, log_p.options())};
}

// The logarithms of the probabilities are computed again: one more pass, but nothing of the size of
// the logits is kept in addition to them.
at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& /*log_sum*/) {
  const at::Tensor log_p = log_probabilities(logits);
  const at::Tensor of_log_p =
      at::nll_loss_backward(grad, log_p, targets.reshape({targets.numel()}), /*weight=*/{},
                            at::Reduction::Sum, kIgnored, at::zeros({}, log_p.options()));
  return at::_log_softmax_backward_data(of_log_p, log_p, 1, log_p.scalar_type())
      .reshape(logits.sizes())
      .to(logits.scalar_type());
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits) {
  logits.copy_(aten::cross_entropy_sum_backward(grad, logits, targets, log_sum));
}

}  // namespace tessera::kernels::aten
