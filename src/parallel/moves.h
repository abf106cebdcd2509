// Moves: what happens to a tensor when its placement over an axis changes, without autograd.
//
// Private to parallel/: transitions.h pairs each with its backward. A tensor is split along a dim
// into contiguous parts in rank order, the first ones one longer where it does not divide.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "parallel/axis.h"

namespace tessera::parallel {

enum class Move : std::uint8_t {
  kIdentity,
  kAllReduce,      ///< sum over ranks
  kAllGather,      ///< parts -> whole
  kReduceScatter,  ///< sum over ranks, of which each keeps its part; the dim divides
  kOwnPart,        ///< whole -> part
  kPad,            ///< part -> whole, zeros elsewhere
  kOnlyFirst,      ///< zeros on all ranks but the first
};

/// The dim along which `whole` elements are split; neither is used by moves that split nothing.
struct Split {
  std::int64_t dim = 0;
  std::int64_t whole = 0;
};

/// Of `whole` elements, those of `rank`.
struct Part {
  std::int64_t begin = 0;
  std::int64_t size = 0;
};
Part part_of(std::int64_t whole, int ranks, int rank);

/// x -> a tensor of its dtype. Sums: addends travel in the axis' dtype, are added in rank order in
/// fp32 where that has 16 bits (else in it), and are rounded once. Collective but for kIdentity,
/// kOwnPart, kPad and kOnlyFirst. More than one rank.
at::Tensor moved(Move move, const at::Tensor& x, const Axis& axis, const Split& split);

}  // namespace tessera::parallel
