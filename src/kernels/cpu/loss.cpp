// The embedding of tokens, and the loss of logits.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/threads/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
namespace {

/// Positions ordered by token, and the tokens in that order, followed by one -1.
struct Order {
  Order(const at::Tensor& ids, std::int64_t padding) {
    const auto* id = static_cast<const std::int64_t*>(ids.const_data_ptr());
    positions.reserve(static_cast<std::size_t>(ids.numel()));
    for (std::int64_t i = 0; i < ids.numel(); ++i) {
      if (id[i] != padding) positions.push_back(i);
    }
    std::stable_sort(positions.begin(), positions.end(),
                     [&](std::int64_t a, std::int64_t b) { return id[a] < id[b]; });
    tokens.reserve(positions.size() + 1);
    for (const std::int64_t position : positions) tokens.push_back(id[position]);
    tokens.push_back(-1);
  }
  std::vector<std::int64_t> positions;
  std::vector<std::int64_t> tokens;
};

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t /*padding*/) {
  weight.const_data_ptr();  // a parameter without data throws here, and not as a failed view
  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  return at::index_select(weight, 0, ids.reshape({ids.numel()})).view(shape);
}

at::Tensor embedding_backward(const at::Tensor& grad_input, const at::Tensor& ids,
                              std::int64_t rows, std::int64_t padding) {
  const at::Tensor grad = grad_input.contiguous();
  const std::int64_t columns = grad.size(-1);
  const Order order(ids.contiguous(), padding);
  const at::Tensor result = at::zeros({rows, columns}, grad.options());
  with_kernels(grad.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    const EmbeddingBackward<T> job{.grad = data<T>(grad),
                                   .tokens = order.tokens.data(),
                                   .order = order.positions.data(),
                                   .grad_weight = mutable_data<T>(result),
                                   .columns = columns};
    base::for_ranges(
        static_cast<std::int64_t>(order.positions.size()), rows_a_thread(columns),
        [&](std::int64_t begin, std::int64_t end) { kernels.embedding_backward(job, begin, end); });
  });
  return result;
}

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
