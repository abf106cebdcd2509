// Plain products around a fused softmax: at the lengths that one rank trains this is faster than a
// flash kernel, and the products take whatever matrix units the machine has. Then the softmax of a
// block of rows that see a window, with sinks.
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"
#include "kernels/results.h"
#include "layout/range.h"

namespace tessera::kernels::cpu {
namespace {

/// B rows, G key/value heads, T positions, R query heads of each, D head_dim.
struct Sizes {
  explicit Sizes(const at::Tensor& q)
      : rows(q.size(0)),
        groups(q.size(1)),
        positions(q.size(2)),
        repeat(q.size(3)),
        head_dim(q.size(4)) {}
  std::int64_t rows, groups, positions, repeat, head_dim;
};

/// What becomes of a tensor: a call returns it, or has it for itself.
enum class Role { kResult, kTemporary };

at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like, Role role) {
  return role == Role::kResult ? result(sizes, like.options()) : at::empty(sizes, like.options());
}

/// Dims 1 and 2 of x [., ., ., .] exchanged, as `sizes`: a copy, where it has to be one.
at::Tensor turned(const at::Tensor& x, at::IntArrayRef sizes, Role role) {
  const at::Tensor other = x.transpose(1, 2);
  if (other.is_contiguous()) return other.view(sizes);
  const at::Tensor copy = empty(sizes, x, role);
  copy.view(other.sizes()).copy_(other);
  return copy;
}

/// a [n, M, K] times b [n, K, N].
at::Tensor product(const at::Tensor& a, const at::Tensor& b, Role role) {
  if (role == Role::kTemporary) return at::bmm(a, b);
  at::Tensor made = empty({a.size(0), a.size(1), b.size(2)}, a, role);
  return at::bmm_out(made, a, b);
}

/// [B, T, G*n*D] -> [B*G, T*n, D], a copy. D is x's own: values may have another than queries.
at::Tensor by_group(const at::Tensor& x, const Sizes& sizes, std::int64_t n, Role role) {
  const std::int64_t head_dim = x.size(2) / (sizes.groups * n);
  return turned(x.view({sizes.rows, sizes.positions, sizes.groups, n * head_dim}),
                {sizes.rows * sizes.groups, sizes.positions * n, head_dim}, role);
}

/// The inverse of by_group.
at::Tensor by_position(const at::Tensor& x, const Sizes& sizes, std::int64_t n) {
  const std::int64_t head_dim = x.size(2);
  return turned(x.view({sizes.rows, sizes.groups, sizes.positions, n * head_dim}),
                {sizes.rows, sizes.positions, sizes.groups * n * head_dim}, Role::kResult);
}

/// [B, G, T, n, D] -> [B*G, T*n, D], a view.
at::Tensor flat(const at::Tensor& x) {
  return x.view({x.size(0) * x.size(1), x.size(2) * x.size(3), x.size(4)});
}

/// Query positions [begin, end): their scores have keys 0..end-1, what lies behind the diagonal is
/// never computed but inside a block.
using Block = layout::Range;

/// Of the positions [first, end).
std::vector<Block> blocks_of(std::int64_t first, std::int64_t end) {
  constexpr std::int64_t kPositions = 256;
  std::vector<Block> blocks;
  for (std::int64_t begin = first; begin < end; begin += kPositions) {
    blocks.push_back({begin, std::min(end, begin + kPositions)});
  }
  return blocks;
}

/// Softmax of the rows of `scores` [B*G, block*R, keys] in place; with `weights` its backward.
void softmax_in_place(const at::Tensor& scores, const at::Tensor& weights, const Block& block,
                      std::int64_t repeat, double scale) {
  with_kernels(scores.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    const CausalRows<T> job{.scores = mutable_data<T>(scores),
                            .weights = data<T>(weights),
                            .keys = block.end,
                            .first = block.begin,
                            .repeat = repeat,
                            .period = block.size() * repeat,
                            .scale = static_cast<float>(scale)};
    const auto kernel =
        weights.defined() ? kernels.causal_softmax_backward : kernels.causal_softmax;
    base::for_ranges(scores.size(0) * scores.size(1), rows_a_thread(job.keys),
                     [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
  });
}

/// The parts of [B*G, T*R, D] and [B*G, T, D] that a block meets.
at::Tensor queries_of(const at::Tensor& x, const Block& block, std::int64_t repeat) {
  return x.narrow(1, block.begin * repeat, block.size() * repeat);
}
at::Tensor keys_of(const at::Tensor& x, const Block& block) { return x.narrow(1, 0, block.end); }

/// What the queries of a block see of the keys, and the mean of values that they make of it.
struct Mixed {
  at::Tensor weights;  ///< [B*G, block*R, end]
  at::Tensor values;   ///< [B*G, block*R, values' D]
};

Mixed mix(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
          const Block& block, std::int64_t repeat, double scale, Role of_weights) {
  const at::Tensor weights = product(queries, keys_of(keys, block).transpose(1, 2), of_weights);
  softmax_in_place(weights, {}, block, repeat, scale);
  return {weights, at::bmm(weights, keys_of(values, block))};
}

at::Tensor joined(const std::vector<at::Tensor>& parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts, 1);
}

/// Keeps no weights. queries [B*G, T*R, D] of the last T of N positions, keys and values
/// [B*G, N, D].
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Sizes& sizes, double scale) {
  const std::int64_t end = keys.size(1);
  const std::int64_t first = end - sizes.positions;
  std::vector<at::Tensor> parts;
  for (const Block& block : blocks_of(first, end)) {
    const Block own{block.begin - first, block.end - first};
    parts.push_back(mix(queries_of(queries, own, sizes.repeat), keys, values, block, sizes.repeat,
                        scale, Role::kTemporary)
                        .values);
  }
  return by_position(joined(parts), sizes, sizes.repeat);
}

/// A gradient of keys or values: one block's is taken as it is, several are added in fp32 and
/// rounded once.
class KeySum {
 public:
  explicit KeySum(const at::Tensor& like) : like_(like) {}
  void add(const at::Tensor& part) {
    if (part.size(1) == like_.size(1) && !sum_.defined()) {
      sum_ = part;
      return;
    }
    if (!sum_.defined()) sum_ = at::zeros(like_.sizes(), at::kFloat);
    sum_.narrow(1, 0, part.size(1)).add_(part);
  }
  at::Tensor take() {
    return sum_.defined() ? sum_.to(like_.scalar_type()) : at::zeros_like(like_);
  }

 private:
  at::Tensor like_, sum_;
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  // Without the weights of all blocks in memory.
  const Sizes sizes(q);
  return attend(flat(q.contiguous()), flat(k.contiguous()),
                by_group(v.contiguous(), sizes, 1, Role::kTemporary), sizes, scale);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(const at::Tensor& q,
                                                                         const at::Tensor& k,
                                                                         const at::Tensor& v,
                                                                         double scale) {
  const Sizes sizes(q);
  const at::Tensor queries = flat(q.contiguous());
  const at::Tensor keys = flat(k.contiguous());
  const at::Tensor values = by_group(v.contiguous(), sizes, 1, Role::kResult);
  std::vector<at::Tensor> kept{queries, keys, values};
  std::vector<at::Tensor> mixed;
  for (const Block& block : blocks_of(0, sizes.positions)) {
    Mixed part = mix(queries_of(queries, block, sizes.repeat), keys, values, block, sizes.repeat,
                     scale, Role::kResult);
    mixed.push_back(std::move(part.values));
    kept.push_back(std::move(part.weights));
  }
  return {by_position(joined(mixed), sizes, sizes.repeat), std::move(kept)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad_input, at::TensorList kept, std::int64_t groups, std::int64_t repeat,
    double scale) {
  const at::Tensor& queries = kept[0];
  const at::Tensor& keys = kept[1];
  const at::Tensor& values = kept[2];
  const at::Tensor grouped_q = queries.view(
      {queries.size(0) / groups, groups, queries.size(1) / repeat, repeat, queries.size(2)});
  const Sizes sizes(grouped_q);
  const at::Tensor grad = by_group(grad_input.contiguous(), sizes, repeat, Role::kTemporary);
  KeySum grad_keys(keys), grad_values(values);
  std::vector<at::Tensor> grad_queries;
  const std::vector<Block> blocks = blocks_of(0, sizes.positions);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const at::Tensor& weights = kept[3 + i];
    const at::Tensor block_grad = queries_of(grad, blocks[i], repeat);
    grad_values.add(at::bmm(weights.transpose(1, 2), block_grad));
    const at::Tensor scores = at::bmm(block_grad, keys_of(values, blocks[i]).transpose(1, 2));
    softmax_in_place(scores, weights, blocks[i], repeat, scale);
    // Of one block the parts are the whole.
    const Role role = blocks.size() == 1 ? Role::kResult : Role::kTemporary;
    grad_queries.push_back(product(scores, keys_of(keys, blocks[i]), role));
    grad_keys.add(product(scores.transpose(1, 2), queries_of(queries, blocks[i], repeat), role));
  }
  const at::Tensor whole = grad_queries.size() == 1 ? grad_queries[0] : at::cat(grad_queries, 1);
  return {whole.view(grouped_q.sizes()),
          grad_keys.take().view({sizes.rows, groups, sizes.positions, 1, sizes.head_dim}),
          by_position(grad_values.take(), sizes, 1)};
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  const Sizes sizes(q);
  const auto by_head = [&](const at::Tensor& x) {
    return x.reshape({sizes.rows * sizes.groups, x.size(2), x.size(3)});
  };
  return attend(flat(q.contiguous()), by_head(keys), by_head(values), sizes, scale);
}

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares, std::int64_t first,
                    std::int64_t window, std::int64_t groups, std::int64_t repeat, double scale) {
  const WindowRows job{.scores = mutable_data<float>(scores),
                       .weights = nullptr,
                       .sinks = sinks ? data<float>(*sinks) : nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .keys = scores.size(2),
                       .first = first,
                       .window = window,
                       .groups = groups,
                       .repeat = repeat,
                       .period = scores.size(1),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_isa().window_softmax;
  base::for_ranges(scores.size(0) * scores.size(1), rows_a_thread(job.keys),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale) {
  const WindowRows job{.scores = mutable_data<float>(grad),
                       .weights = data<float>(weights),
                       .sinks = nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .keys = grad.size(2),
                       .first = first,
                       .window = window,
                       .groups = groups,
                       .repeat = repeat,
                       .period = grad.size(1),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_isa().window_softmax_backward;
  base::for_ranges(grad.size(0) * grad.size(1), rows_a_thread(job.keys),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  const std::int64_t groups = sum.numel() / repeat;
  const at::Tensor wide = rows.to(at::kDouble);
  const auto* terms = data<double>(wide);
  auto* sums = mutable_data<double>(sum);
  for (std::int64_t group = 0; group < wide.size(0); ++group) {
    double* of_group = sums + group % groups * repeat;
    for (std::int64_t i = 0; i < wide.size(1); ++i) of_group[i % repeat] += *terms++;
  }
}

}  // namespace tessera::kernels::cpu
