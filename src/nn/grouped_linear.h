// Many matrices, each for a range of rows of its own: what the experts of a mixture compute.
//
// Computed in the weight's dtype, returned in the input's, as linear.h does. Short symbols: M rows,
// E groups, K inputs, N outputs. Next: ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::nn {

/// Rows [begin[e], begin[e + 1]) belong to group e: E + 1 numbers from 0 to M.
using GroupOffsets = std::vector<std::int64_t>;

/// x [M, K], weight [E, N, K] -> [M, N]; rows of group e are multiplied by weight[e]^T. The
/// gradient of a group without rows is zeros.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight,
                          const GroupOffsets& offsets);

/// The same out of ATen operations.
at::Tensor grouped_linear_composite(const at::Tensor& x, const at::Tensor& weight,
                                    const GroupOffsets& offsets);

}  // namespace tessera::nn
