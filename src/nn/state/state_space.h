// The state-space dual of Mamba-2: a linear recurrence over positions, computed by products of
// chunks.
//
// Each head has a state S [P, N] that decays and takes in one outer product a position:
//   S = exp(dt a) S + dt x b^T,   y = S c + d x.
// Within a chunk of positions that is attention without a softmax, whose weight of position j in
// position i is c_i . b_j times the decay between them; from chunk to chunk only the state is
// passed on. The chunk changes the order of additions and nothing else. Short symbols: B rows, T
// positions, H heads, P head_dim, G groups (consecutive heads share b and c of one), N state size.
// Source: Dao, Gu, "Transformers are SSMs" (arXiv 2405.21060), section 6. Next: mamba.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nn/documents.h"

namespace tessera::nn {

struct StateSpaceInputs {
  at::Tensor x;     ///< [B, T, H, P]
  at::Tensor dt;    ///< [B, T, H] fp32, not negative: after bias, softplus and limit
  at::Tensor a;     ///< [H] fp32, negative: -exp(A_log)
  at::Tensor b, c;  ///< [B, T, G, N]
  at::Tensor d;     ///< [H] fp32
};

/// y [B, T, H, P] in x's dtype, computed in fp32 (in fp64 for x of fp64). The state begins at zero
/// in each document. The host reads no border: a chunk's pairs of two documents weigh 0. For the
/// backward one state a chunk is kept in addition to the inputs, B H P N each; all else is computed
/// again.
at::Tensor state_space(const StateSpaceInputs& in, std::int64_t chunk, const Documents& documents);

/// The same without gradient, for positions that follow `state` [B, H, P, N] fp32 (undefined:
/// nothing before them), which becomes the state after them.
at::Tensor state_space_after(const StateSpaceInputs& in, std::int64_t chunk, at::Tensor& state);

}  // namespace tessera::nn
