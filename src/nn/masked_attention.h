// Attention that is not merely causal: a mask says who sees whom (sliding windows, images inside a
// text, padding), a window ends how far it looks back, or it may look at nothing: each head has a
// sink, one more logit whose probability goes nowhere.
//
// Softmax is fp32; with windows and sinks the scores and sums are, too, and the result is rounded
// once. attention.h has the faster form for what is merely causal. Short symbols: B rows, T
// positions or queries, N keys, G key/value heads, R query heads of each, D head_dim. Next: mlp.h.
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

struct MaskedKeys {
  at::Tensor hidden;      ///< bool, broadcast to [B, G, T, R, N]: what no query sees
  at::Tensor sinks = {};  ///< [G*R]: one more logit a head that takes its share of the softmax
};
/// q [B, G, T, R, D], keys and values [B, G, N, D] -> [B, T, G*R*D], D that of values, out of ATen
/// operations.
at::Tensor attention_composite(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, const MaskedKeys& masked_keys,
                               double scale);

/// Runs of consecutive true values: flags [B, T] bool -> [B, T] i64, the number of the run in its
/// row (0, 1, ...), -1 outside.
at::Tensor number_runs(const at::Tensor& flags);

/// [B or 1, T, T] bool: key j is seen by query i where j > i - window and either j <= i or both
/// belong to one block (blocks [B, T] as number_runs gives them). The window has no upper end: a
/// block sees itself however far. On the device of attention's inputs.
at::Tensor sliding_visibility(std::int64_t positions, std::int64_t window,
                              const std::optional<at::Tensor>& blocks,
                              at::Device device = at::kCPU);

struct AttentionMask {
  std::optional<std::int64_t> window;  ///< query i sees key j where i - window < j <= i
  at::Tensor sinks;                    ///< [G*R], or undefined
};

/// q [B, G, T, R, D] of the last T of the N positions that keys and values [B, G, N, D] hold ->
/// [B, T, G*R*D], D that of values. Queries are taken in blocks, each with the keys that it sees.
/// Nothing but the inputs is kept for backward, and the gradient of sinks is fp32 however narrow
/// they are.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionMask& mask, double scale);

}  // namespace tessera::nn
