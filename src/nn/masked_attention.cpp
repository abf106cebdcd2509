#include "nn/masked_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "tessera/wide_scope.h"

namespace tessera::nn {

at::Tensor attention_composite(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, const Unseen& unseen, double scale) {
  const std::int64_t rows = q.size(0);
  const std::int64_t groups = q.size(1);
  const std::int64_t positions = q.size(2);
  const std::int64_t repeat = q.size(3);
  const std::int64_t head_dim = q.size(4);
  const std::int64_t seen = keys.size(2);
  const at::Tensor queries = q.reshape({rows, groups, positions * repeat, head_dim});
  const at::Tensor scores = at::matmul(queries, keys.transpose(2, 3)) * scale;
  const at::ScalarType inside = at::promote_types(q.scalar_type(), at::kFloat);
  const at::Tensor weights = [&] {
    const WideScope softmax;
    const at::Tensor masked =
        scores.to(inside)
            .view({rows, groups, positions, repeat, seen})
            .masked_fill(unseen.hidden, -std::numeric_limits<double>::infinity());
    if (!unseen.sinks.defined()) return at::softmax(masked, 4).to(q.scalar_type());
    const at::Tensor sinks = unseen.sinks.to(inside)
                                 .view({1, groups, 1, repeat, 1})
                                 .expand({rows, groups, positions, repeat, 1});
    return at::softmax(at::cat({masked, sinks}, 4), 4).narrow(4, 0, seen).to(q.scalar_type());
  }();
  return at::matmul(weights.reshape({rows, groups, positions * repeat, seen}), values)
      .view({rows, groups, positions, repeat * values.size(3)})
      .transpose(1, 2)
      .reshape({rows, positions, groups * repeat * values.size(3)});
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& visible, double scale) {
  const at::Tensor values = v.reshape({q.size(0), q.size(2), q.size(1), q.size(4)}).transpose(1, 2);
  return attention_composite(q, k.squeeze(3), values,
                             {.hidden = visible.logical_not().unsqueeze(1).unsqueeze(3)}, scale);
}

at::Tensor number_runs(const at::Tensor& flags) {
  if (flags.size(1) == 0) return flags.to(at::kLong);
  const at::Tensor before =
      at::cat({at::zeros_like(flags.narrow(1, 0, 1)), flags.narrow(1, 0, flags.size(1) - 1)}, 1);
  const at::Tensor begins = flags.logical_and(before.logical_not());
  const at::Tensor numbers = at::cumsum(begins.to(at::kLong), 1) - 1;
  return numbers.masked_fill(flags.logical_not(), -1);
}

at::Tensor sliding_visibility(std::int64_t positions, std::int64_t window,
                              const std::optional<at::Tensor>& blocks) {
  const at::Tensor position =
      at::arange(positions, blocks ? blocks->options() : at::TensorOptions(at::kLong));
  const at::Tensor query = position.unsqueeze(1);
  const at::Tensor key = position.unsqueeze(0);
  at::Tensor seen = (key <= query).unsqueeze(0);
  if (blocks) {
    const at::Tensor of_query = blocks->unsqueeze(2);
    seen = seen.logical_or((of_query == blocks->unsqueeze(1)).logical_and(of_query >= 0));
  }
  return seen.logical_and(key > query - window);
}

}  // namespace tessera::nn
