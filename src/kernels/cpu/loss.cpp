#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"

namespace tessera::nn::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits_input,
                            const at::Tensor& targets_input, bool consume) {
    const at::Tensor logits = logits_input.contiguous();
    const at::Tensor targets = targets_input.contiguous();
    const at::Tensor log_sum = at::empty(targets.sizes(), at::kFloat);
    std::vector<double> losses(static_cast<std::size_t>(targets.numel()));
    with_kernels(logits.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      CrossEntropy<T> job{};
      job.logits = data<T>(logits);
      job.targets = data<std::int64_t>(targets);
      job.log_sum = mutable_data<float>(log_sum);
      job.loss = losses.data();
      job.vocabulary = logits.size(-1);
      base::for_ranges(targets.numel(), rows_a_thread(job.vocabulary),
                       [&](std::int64_t begin, std::int64_t end) {
                         kernels.cross_entropy_forward(job, begin, end);
                       });
    });
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, targets, log_sum});
    ctx->saved_data["consume"] = consume;
    return at::scalar_tensor(std::accumulate(losses.begin(), losses.end(), 0.0), at::kFloat);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const bool consume = ctx->saved_data["consume"].toBool();
    const at::Tensor result = consume ? logits.detach() : at::empty_like(logits);
    with_kernels(logits.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      CrossEntropy<T> job{};
      job.logits = data<T>(logits);
      job.targets = data<std::int64_t>(saved[1]);
      job.log_sum = const_cast<float*>(data<float>(saved[2]));
      job.grad_logits = mutable_data<T>(result);
      job.grad = grads[0].item<float>();
      job.vocabulary = logits.size(-1);
      base::for_ranges(saved[1].numel(), rows_a_thread(job.vocabulary),
                       [&](std::int64_t begin, std::int64_t end) {
                         kernels.cross_entropy_backward(job, begin, end);
                       });
    });
    // A second backward through this graph would read gradients as logits: autograd now refuses it.
    if (consume) logits.unsafeGetTensorImpl()->bump_version();
    return {result, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, Logits use) {
  return CrossEntropyFunction::apply(logits, targets, use == Logits::kConsume);
}

}  // namespace tessera::nn::cpu
