// Many matrices, each for a range of rows of its own, as the experts of a mixture need them; and
// the products without derivatives that it is made of: rows by matrices, and rows by rows.
//
// Computed in the weight's dtype, returned in the input's, as linear.h does. There are three ways
// to form the products, with the same numbers: libtorch's grouped product; a loop over the groups
// where dtype or strides do not fit it; for bf16 on the CPU a loop whose row counts are rounded up,
// because oneDNN sets up a product for each row count that it has not seen (measured: 723 us
// against 71 us). In fp32 all are bitwise the loop. Short symbols: M rows, E groups, K inputs, N
// outputs. Next: ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "grad/weight_gradient.h"
#include "nn/gates.h"

namespace tessera::nn {

/// Rows [begin[e], begin[e + 1]) belong to group e: E + 1 numbers from 0 to M.
using GroupOffsets = std::vector<std::int64_t>;

/// The groups where rows lie on a device.
struct RowGroups {
  GroupOffsets begins = {};  ///< empty: only the device knows them
  at::Tensor ends = {};      ///< [E] i32 on the device, without the first 0; undefined on the CPU
};
/// Whether libtorch has a kernel for groups on a device of this capability (comm::DeviceFacts); 0
/// is a device that is not CUDA's. On others it reads the ends on the host and multiplies group by
/// group.
bool has_grouped_kernel(int capability);
/// Whether products with a weight need the begins of groups on the host: all except those that
/// libtorch's kernel for devices forms by itself, which are bf16 with rows of multiples of 16
/// bytes, where there is one.
bool needs_begins(const at::Tensor& weight);

enum class GroupedWay : std::uint8_t { kLibtorch, kLoop, kRoundedRows };
/// How the products of these are formed: a and b are as below.
GroupedWay grouped_way(const at::Tensor& a, const at::Tensor& b);

/// a [M, K] contiguous, b [E, K, N] -> [M, N]: rows of group e times b[e].
at::Tensor grouped_rows(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups,
                        GroupedWay way);
inline at::Tensor grouped_rows(const at::Tensor& a, const at::Tensor& b,
                               const GroupOffsets& offsets, GroupedWay way) {
  return grouped_rows(a, b, RowGroups{offsets}, way);
}

/// a [M, A], b [M, B] contiguous -> [E, A, B]: a_e^T b_e over the rows of group e, zeros where
/// there are none.
at::Tensor grouped_outer(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups,
                         GroupedWay way);
inline at::Tensor grouped_outer(const at::Tensor& a, const at::Tensor& b,
                                const GroupOffsets& offsets, GroupedWay way) {
  return grouped_outer(a, b, RowGroups{offsets}, way);
}

/// How the weight of a group lies.
enum class GroupLayout : std::uint8_t {
  kOutIn,  ///< [E, N, K]
  kInOut,  ///< [E, K, N]
};

struct GroupedWeights {
  at::Tensor weight;
  at::Tensor bias = {};  ///< [E, N], undefined: none
  GroupLayout layout = GroupLayout::kOutIn;
  /// When the weight's gradient is formed. A bias' sum is too small to fill an exchange.
  grad::WeightGradient when = grad::WeightGradient::kMayWait;
};

/// x [M, K] -> [M, N]; rows of group e are multiplied by its matrix, then its bias is added. The
/// gradients of a group without rows are zeros.
at::Tensor grouped_linear(const ProductInput& x, const GroupedWeights& weights,
                          const RowGroups& groups);
inline at::Tensor grouped_linear(const ProductInput& x, const GroupedWeights& weights,
                                 const GroupOffsets& offsets) {
  return grouped_linear(x, weights, RowGroups{offsets});
}

/// The same out of ATen operations.
at::Tensor grouped_linear_composite(const at::Tensor& x, const GroupedWeights& weights,
                                    const GroupOffsets& offsets);

}  // namespace tessera::nn
