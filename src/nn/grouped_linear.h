// Many matrices, each for a range of rows of its own: what the experts of a mixture compute.
//
// Computed in the weight's dtype, returned in the input's, as linear.h does. Short symbols: M rows,
// E groups, K inputs, N outputs. Next: grouped_products.h, ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nn/grouped_products.h"

namespace tessera::nn {

/// How the weight of a group lies.
enum class GroupLayout : std::uint8_t {
  kOutIn,  ///< [E, N, K]
  kInOut,  ///< [E, K, N]
};

struct GroupedWeights {
  at::Tensor weight;
  at::Tensor bias = {};  ///< [E, N], undefined: none
  GroupLayout layout = GroupLayout::kOutIn;
};

/// x [M, K] -> [M, N]; rows of group e are multiplied by its matrix, then its bias is added. The
/// gradients of a group without rows are zeros.
at::Tensor grouped_linear(const at::Tensor& x, const GroupedWeights& weights,
                          const GroupOffsets& offsets);

/// The same out of ATen operations.
at::Tensor grouped_linear_composite(const at::Tensor& x, const GroupedWeights& weights,
                                    const GroupOffsets& offsets);

}  // namespace tessera::nn
