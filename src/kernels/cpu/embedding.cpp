#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
namespace {

/// Positions ordered by token, and the tokens in that order with one -1 behind them.
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
  weight.const_data_ptr();  // a parameter without data says so here, not as a failed view
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

}  // namespace tessera::kernels::cpu
