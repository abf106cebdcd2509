// Attention that is not merely causal: what a query sees has other ends (sliding windows, documents
// packed into a row, images inside a text), or a query may see nothing: each head has a sink, one
// more logit whose probability is dropped.
//
// Softmax is fp32; with windows and sinks the scores and sums are, too, and the result is rounded
// once. attention.h has the faster form for what is merely causal. Short symbols: B rows, T
// positions or queries, N keys, G key/value heads, R query heads of each, D head_dim. Next: mlp.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

struct AttentionMask {
  std::optional<std::int64_t> window = {};  ///< query i sees key j where i - window < j <= i
  at::Tensor sinks = {};                    ///< [G*R], or undefined
  /// [B, T] i64, or undefined: the first key that a query sees, and one past the last, which may
  /// lie after the query (documents.h). Every query sees a key.
  at::Tensor begins = {};
  at::Tensor ends = {};
};

/// q [B, G, T, R, D] of the last T of the N positions that keys and values [B, G, N, D] hold -> [B,
/// T, G*R*D], D that of values. Queries are taken in blocks, each with the keys that it sees. Only
/// the inputs are kept for backward, and the gradient of sinks is always fp32.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionMask& mask, double scale);

}  // namespace tessera::nn
