// Attention in which a mask says who sees whom: sliding windows, images inside a text, padding.
//
// Softmax is fp32. attention.h has the faster form for what is merely causal. Short symbols: B
// rows, T positions, G key/value heads, R query heads of each, D head_dim. Next: mlp.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

/// q [B, G, T, R, D], k [B, G, T, 1, D], v [B, T, G*D] as causal_attention takes them; visible
/// [B or 1, T or 1, T] bool: whether query i (dim 1) sees key j (dim 2). -> [B, T, G*R*D]. Every
/// query must see a key.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& visible, double scale);

struct Unseen {
  at::Tensor hidden;      ///< bool, broadcast to [B, G, T, R, N]: what no query sees
  at::Tensor sinks = {};  ///< [G*R]: one more logit a head that takes its share of the softmax
};
/// q [B, G, T, R, D], keys and values [B, G, N, D] -> [B, T, G*R*D], D that of values, out of ATen
/// operations.
at::Tensor attention_composite(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, const Unseen& unseen, double scale);

/// Runs of consecutive true values: flags [B, T] bool -> [B, T] i64, the number of the run in its
/// row (0, 1, ...), -1 outside.
at::Tensor number_runs(const at::Tensor& flags);

/// [B or 1, T, T] bool: key j is seen by query i where j > i - window and either j <= i or both
/// belong to one block (blocks [B, T] as number_runs gives them). The window has no upper end: a
/// block sees itself however far.
at::Tensor sliding_visibility(std::int64_t positions, std::int64_t window,
                              const std::optional<at::Tensor>& blocks);

}  // namespace tessera::nn
