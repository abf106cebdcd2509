// Layers' functions out of differentiable ATen operations: what fused forms are tested with.
//
// Autograd derives their gradients, so that these prove ours, of kernels/cpu and of kernels/aten
// alike.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "nn/embedding.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

inline at::Tensor rms_norm_composite(const at::Tensor& x, const at::Tensor& weight, double eps,
                                     NormRounding rounding = NormRounding::kBeforeWeight) {
  const WideScope mean_of_squares;
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  const at::Tensor wide = x.to(inside);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  if (rounding == NormRounding::kOnce) return (normed * weight.to(inside)).to(x.scalar_type());
  return (normed.to(x.scalar_type()) * weight).to(x.scalar_type());
}

inline at::Tensor rope_heads_composite(const at::Tensor& x, const HeadLayout& layout,
                                       const HeadNorm& norm, const RopeTable& table) {
  const std::int64_t head_dim = x.size(2) / layout.heads;
  at::Tensor split =
      x.reshape({x.size(0), x.size(1), layout.heads / layout.repeat, layout.repeat, head_dim});
  if (norm.weight.defined())
    split = rms_norm_composite(split, norm.weight, norm.eps, norm.rounding);
  const at::Tensor turned = split.transpose(1, 2);  // [B, G, T, R, D]
  const at::Tensor first = turned.narrow(4, 0, head_dim / 2);
  const at::Tensor second = turned.narrow(4, head_dim / 2, head_dim / 2);
  const at::Tensor cos = table.cos.unsqueeze(1);
  const at::Tensor sin = table.sin.unsqueeze(1);
  return at::cat({first * cos - second * sin, second * cos + first * sin}, /*dim=*/4);
}

inline at::Tensor swiglu_composite(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

inline at::Tensor clamped_swiglu_composite(const at::Tensor& both, const ClampedSwiglu& options) {
  const at::Tensor pairs = both.unflatten(-1, {both.size(-1) / 2, 2});
  const at::Tensor gate = pairs.select(-1, 0), up = pairs.select(-1, 1);
  const auto wide = [](const at::Tensor& x) {
    return x.to(at::promote_types(x.scalar_type(), at::kFloat));
  };
  const at::Tensor g = wide(gate).clamp_max(options.limit);
  const at::Tensor u = wide(up).clamp(-options.limit, options.limit);
  return ((u + 1) * (g * at::sigmoid(g * options.alpha))).to(both.scalar_type());
}

inline at::Tensor embedding_composite(const at::Tensor& ids, const at::Tensor& weight,
                                      std::optional<std::int64_t> padding = std::nullopt) {
  return at::embedding(weight, ids, padding.value_or(-1));
}

inline at::Tensor cross_entropy_sum_composite(const at::Tensor& logits, const at::Tensor& targets) {
  const WideScope loss;
  const std::int64_t vocabulary = logits.size(2);
  const at::ScalarType inside = at::promote_types(logits.scalar_type(), at::kFloat);
  const std::int64_t rows = logits.size(0) * logits.size(1);
  return at::cross_entropy_loss(logits.to(inside).reshape({rows, vocabulary}),
                                targets.reshape({rows}), /*weight=*/{}, at::Reduction::Sum,
                                kIgnoredLabel);
}

struct MaskedKeys {
  at::Tensor hidden;      ///< bool, broadcast to [B, G, T, R, N]: what no query sees
  at::Tensor sinks = {};  ///< [G*R]: one more logit a head that takes its share of the softmax
};
/// q [B, G, T, R, D], keys and values [B, G, N, D] -> [B, T, G*R*D], D that of values, out of ATen
/// operations.
inline at::Tensor attention_composite(const at::Tensor& q, const at::Tensor& keys,
                                      const at::Tensor& values, const MaskedKeys& masked_keys,
                                      double scale) {
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
            .masked_fill(masked_keys.hidden, -std::numeric_limits<double>::infinity());
    if (!masked_keys.sinks.defined()) return at::softmax(masked, 4).to(q.scalar_type());
    const at::Tensor sinks = masked_keys.sinks.to(inside)
                                 .view({1, groups, 1, repeat, 1})
                                 .expand({rows, groups, positions, repeat, 1});
    return at::softmax(at::cat({masked, sinks}, 4), 4).narrow(4, 0, seen).to(q.scalar_type());
  }();
  return at::matmul(weights.reshape({rows, groups, positions * repeat, seen}), values)
      .view({rows, groups, positions, repeat * values.size(3)})
      .transpose(1, 2)
      .reshape({rows, positions, groups * repeat * values.size(3)});
}

/// q, k and v as causal_attention takes them; visible [B or 1, T or 1, T] bool: whether query i
/// (dim 1) sees key j (dim 2). -> [B, T, G*R*D]. Every query must see a key.
inline at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& visible, double scale) {
  const at::Tensor values = v.reshape({q.size(0), q.size(2), q.size(1), q.size(4)}).transpose(1, 2);
  return attention_composite(q, k.squeeze(3), values,
                             {.hidden = visible.logical_not().unsqueeze(1).unsqueeze(3)}, scale);
}

inline at::Tensor cached_attention_composite(const at::Tensor& q, const at::Tensor& keys,
                                             const at::Tensor& values, double scale) {
  const std::int64_t positions = q.size(2);
  const at::Tensor position = at::arange(keys.size(2), q.device());
  const at::Tensor own = position.narrow(0, keys.size(2) - positions, positions);
  const at::Tensor later = position > own.view({positions, 1, 1});
  return attention_composite(q, keys, values, {.hidden = later}, scale);
}

inline at::Tensor causal_attention_composite(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, double scale) {
  const std::int64_t head_dim = v.size(2) / q.size(1);
  const at::Tensor values = v.reshape({q.size(0), q.size(2), q.size(1), head_dim}).transpose(1, 2);
  return cached_attention_composite(q, k.squeeze(3), values, scale);
}

inline at::Tensor windowed_attention_composite(const at::Tensor& q, const at::Tensor& keys,
                                               const at::Tensor& values, const AttentionMask& mask,
                                               double scale) {
  // Sinks get their gradient out of sums that nearly cancel: 16-bit scores would leave little of
  // it.
  // The block of one product: enough rows to be worth it, few enough that its scores stay small.
  constexpr std::int64_t block_size = 256;
  const WideScope scores;
  const at::ScalarType inside = at::promote_types(q.scalar_type(), at::kFloat);
  const at::Tensor wide_q = q.to(inside);
  const at::Tensor wide_keys = keys.to(inside);
  const at::Tensor wide_values = values.to(inside);
  const std::int64_t queries = q.size(2);
  const std::int64_t first = keys.size(2) - queries;
  const at::Tensor positions = at::arange(keys.size(2), q.device());
  std::vector<at::Tensor> blocks;
  std::int64_t begin = 0;
  do {
    const std::int64_t end = std::min(begin + block_size, queries);
    const std::int64_t seen_from =
        mask.window ? std::max<std::int64_t>(0, first + begin - *mask.window + 1) : 0;
    const std::int64_t seen = first + end - seen_from;
    const at::Tensor key = positions.narrow(0, seen_from, seen);
    const at::Tensor own =
        positions.narrow(0, first + begin, end - begin).view({end - begin, 1, 1});
    at::Tensor hidden = key > own;
    if (mask.window) hidden = hidden.logical_or(key <= own - *mask.window);
    blocks.push_back(attention_composite(
        wide_q.narrow(2, begin, end - begin), wide_keys.narrow(2, seen_from, seen),
        wide_values.narrow(2, seen_from, seen), {.hidden = hidden, .sinks = mask.sinks}, scale));
    begin = end;
  } while (begin < queries);
  return (blocks.size() == 1 ? blocks.front() : at::cat(blocks, 1)).to(q.scalar_type());
}

/// Who sees whom, [B or 1, T, T] bool, of runs of flags that see themselves whole and documents.
inline at::Tensor seen_by_each(std::int64_t window, const at::Tensor& flags,
                               const at::Tensor& starts) {
  const at::Tensor position = at::arange(flags.size(1));
  const at::Tensor query = position.unsqueeze(1), key = position.unsqueeze(0);
  const at::Tensor same = starts.unsqueeze(2) == starts.unsqueeze(1);
  // Between two positions of one run there is no position outside of it.
  const at::Tensor outside = at::cumsum(flags.logical_not().to(at::kLong), 1);
  const at::Tensor run = (outside.unsqueeze(2) == outside.unsqueeze(1))
                             .logical_and(flags.unsqueeze(2))
                             .logical_and(flags.unsqueeze(1));
  return (key <= query)
      .unsqueeze(0)
      .logical_or(run)
      .logical_and(same)
      .logical_and(key > query - window);
}

}  // namespace tessera::nn
