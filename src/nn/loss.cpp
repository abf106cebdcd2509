#include "nn/loss.h"

#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "tessera/error.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits_input,
                            const at::Tensor& targets_input, bool consume) {
    const at::Tensor logits = logits_input.contiguous();
    const at::Tensor targets = targets_input.contiguous();
    auto [loss, log_sum] = kernels::cross_entropy_sum(logits, targets);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, targets, log_sum});
    ctx->saved_data["consume"] = consume;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &log_sum = saved[2];
    const at::Tensor none;
    if (!ctx->saved_data["consume"].toBool()) {
      return {kernels::cross_entropy_sum_backward(grads[0], logits, targets, log_sum), none, none};
    }
    const at::Tensor result = logits.detach();
    kernels::cross_entropy_sum_backward_over(grads[0], targets, log_sum, result);
    // A second backward through this graph would read gradients as logits: autograd now refuses it.
    logits.unsafeGetTensorImpl()->bump_version();
    return {result, none, none};
  }
};

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

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, Logits use) {
  check_targets(logits, targets);
  if (base::has_second_derivatives(logits)) {
    return std::get<0>(kernels::cross_entropy_sum(logits, targets));
  }
  return CrossEntropyFunction::apply(logits, targets, use == Logits::kConsume);
}

}  // namespace tessera::nn
