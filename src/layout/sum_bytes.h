// The bytes that a rank sends for the sum of a tensor over ranks, as an all-reduce sends them and
// plans count them. Pure. Next: ../comm/ops/all_reduce.h, docs/communication.md.
#pragma once

#include <cstdint>

#include "layout/range.h"

namespace tessera::layout {

/// Up to this many bytes of all addends every rank sends its own to every other: one round, not
/// two.
inline constexpr std::int64_t kOneRoundBytes = std::int64_t{256} << 10;

/// Whether the sum takes two rounds, by the `bytes` of a rank's addends.
inline bool in_two_rounds(std::int64_t bytes, int ranks) {
  return ranks > 2 && bytes * ranks > kOneRoundBytes;
}

struct SummedTensor {
  std::int64_t numel = 0;
  std::int64_t addend_bytes = 0;  ///< of an element that is added
  std::int64_t sum_bytes = 0;     ///< of an element of the sum
};

/// Bytes that the rank sends.
inline std::int64_t sum_sent_bytes(const SummedTensor& of, int ranks, int rank) {
  if (!in_two_rounds(of.numel * of.addend_bytes, ranks)) {
    return (ranks - 1) * of.numel * of.addend_bytes;
  }
  const std::int64_t own = part_of(of.numel, ranks, rank).size();
  return (of.numel - own) * of.addend_bytes + (ranks - 1) * own * of.sum_bytes;
}

}  // namespace tessera::layout
