// The short convolution before a layer with a state: of each channel over its last few positions.
//
// Position t of a channel is silu(bias + sum of weight[w] x[t - (W - 1) + w]); what would lie
// before the row, or before the document, is 0. Short symbols: B rows, T positions, C channels, W
// positions that one sees (4). Next: delta_rule.h, gated_rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/documents.h"

namespace tessera::nn {

/// x [B, T, C], weight [C, 1, W], bias [C] or undefined -> [B, T, C] in x's dtype. Computed in the
/// weight's dtype as nn::linear is, and so are the raw gradients of weight and bias: x is rounded
/// to it, products are summed in fp32 (fp64 of fp64), and the sum is rounded once before the silu.
/// Keeps x and forms the sums again in backward. Errors: kUsage for a second derivative.
at::Tensor short_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                             const Documents& documents);

/// The same without a gradient for positions that follow `context` [B, W-1, C] (undefined: nothing
/// comes before), which is replaced by the last W-1 positions.
at::Tensor short_convolution_after(const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& bias, at::Tensor& context);

}  // namespace tessera::nn
