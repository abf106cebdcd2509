// Causal attention that looks back over a window only, or that may look at nothing: each head has
// a sink, one more logit whose probability goes nowhere.
//
// Scores, softmax and sums are fp32, the result is rounded once. attention.h has the faster form
// for what is merely causal. Short symbols: B rows, T queries, N keys, G key/value heads, R query
// heads of each, D head_dim. Next: masked_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

struct AttentionReach {
  std::optional<std::int64_t> window;  ///< query i sees key j where i - window < j <= i
  at::Tensor sinks;                    ///< [G*R], or undefined
};

/// q [B, G, T, R, D] of the last T of the N positions that keys and values [B, G, N, D] hold ->
/// [B, T, G*R*D], D that of values. Queries are taken in blocks, each with the keys that it sees.
/// Nothing but the inputs is kept for backward, and the gradient of sinks is fp32 however narrow
/// they are.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionReach& reach, double scale);

}  // namespace tessera::nn
