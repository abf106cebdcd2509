// Rotary position embedding in two dimensions: the first half of a head turns with x, the second
// with y.
//
// Each half is turned in pairs (a[j], a[j + D/4]), with the frequencies of a head of D/2. Positions
// come with the input, one (x, y) a patch. Short symbols: N images, P patches, H heads, D head_dim.
// Next: masked_attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/rope.h"

namespace tessera::nn {

/// cos and sin [N, P, 2, D/4] of (x, y), computed in fp32, then cast.
struct AxialTable {
  at::Tensor cos;
  at::Tensor sin;
};

/// positions [N, P, 2] i64.
AxialTable axial_table(const at::Tensor& positions, std::int64_t head_dim, double theta,
                       at::ScalarType dtype);

/// x [N, P, H*D] -> norm of each head if asked, then turned: [N, H/R, P, R, D], as rope_heads gives
/// it.
at::Tensor axial_rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                            const AxialTable& table);

}  // namespace tessera::nn
