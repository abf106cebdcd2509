#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <numeric>
#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
namespace {

/// `result` may be the logits themselves.
void run_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& targets,
                  const at::Tensor& log_sum, const at::Tensor& result) {
  with_kernels(logits.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    CrossEntropy<T> job{};
    job.logits = data<T>(logits);
    job.targets = data<std::int64_t>(targets);
    job.log_sum = const_cast<float*>(data<float>(log_sum));
    job.grad_logits = mutable_data<T>(result);
    job.grad = grad.item<float>();
    job.vocabulary = logits.size(-1);
    base::for_ranges(targets.numel(), rows_a_thread(job.vocabulary),
                     [&](std::int64_t begin, std::int64_t end) {
                       kernels.cross_entropy_backward(job, begin, end);
                     });
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits_input,
                                                     const at::Tensor& targets_input) {
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
  return {at::scalar_tensor(std::accumulate(losses.begin(), losses.end(), 0.0), at::kFloat),
          log_sum};
}

at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits_input,
                                      const at::Tensor& targets, const at::Tensor& log_sum) {
  const at::Tensor logits = logits_input.contiguous();
  const at::Tensor result = at::empty_like(logits);
  run_backward(grad, logits, targets.contiguous(), log_sum, result);
  return result;
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits) {
  run_backward(grad, logits, targets.contiguous(), log_sum, logits);
}

}  // namespace tessera::kernels::cpu
