// The gated delta rule of Qwen3-Next's linear attention, in its chunked form.
//
// Each value head has a state [K, V], a map from keys to values. A position lets the state decay,
// looks up its key, and writes the part `beta` of what the value differs by from what it found:
//   S_t = exp(decay_t) S_(t-1),  S_t += beta_t k_t (v_t - k_t^T S_t),  o_t = q_t^T S_t.
// Written out over a chunk of positions this is a unit triangular system within the chunk and
// products with the state that comes in. Source: Yang et al., "Gated Delta Networks: Improving
// Mamba2 with Delta Rule" (2024). Documents have states of their own. Next: delta_chunks.h,
// short_convolution.h.
//
// Short symbols: B rows, T positions, G key heads, H value heads (a multiple of G; consecutive
// value heads share a key head), K key head dim, V value head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/documents.h"

namespace tessera::nn {

struct DeltaInputs {
  at::Tensor q, k;   ///< [B, T, G, K], before their normalization
  at::Tensor v;      ///< [B, T, H, V]
  at::Tensor decay;  ///< [B, T, H] fp32: the log of the factor of the state, <= 0
  at::Tensor beta;   ///< [B, T, H] fp32: how much of a value is written
};

/// -> [B, T, H, V] in v's dtype, computed in fp32 (fp64 where v is). q and k are divided by
/// sqrt(sum of squares + 1e-6), q is scaled by 1 / sqrt(K). Its backward keeps the inputs alone and
/// computes the states again. Errors: kUsage for a second derivative.
at::Tensor gated_delta_rule(const DeltaInputs& in, const Documents& documents);

/// The same without a gradient for positions that follow `state` [B, H, K, V] fp32 (fp64 where v
/// is; undefined: nothing comes before), which is replaced by the state behind the last position.
at::Tensor gated_delta_rule_after(const DeltaInputs& in, at::Tensor& state);

}  // namespace tessera::nn
