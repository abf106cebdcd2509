// Places several buffers in one block of memory, by the time in which each is needed. Pure.
//
// Greedy: the largest first, each at the lowest offset that is free for its lifetime. Source:
// Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020), greedy by
// size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::capture {

/// A buffer that is alive from step `first` to step `last`, both included.
struct Lifetime {
  std::int64_t bytes = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

struct ArenaPlan {
  std::vector<std::int64_t> offsets;  ///< of each, multiples of kArenaAlignment
  std::int64_t bytes = 0;             ///< of the block
};

/// The alignment of fresh memory of libtorch's.
inline constexpr std::int64_t kArenaAlignment = 64;

/// Makes the plan; the same lifetimes give the same one.
ArenaPlan plan_arena(const std::vector<Lifetime>& lifetimes);

/// Returns the faults of a plan, a line each: offsets that are missing, not aligned or outside, two
/// buffers that share bytes while both are alive.
std::vector<std::string> faults_of(const ArenaPlan& plan, const std::vector<Lifetime>& lifetimes);

}  // namespace tessera::capture
