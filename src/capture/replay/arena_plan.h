// Where in one block of memory each of several buffers lies, by the time in which it is needed. Pure.
//
// Greedy: the largest first, each at the lowest offset at which it meets nobody who is alive at the
// same time. Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference"
// (2020), greedy by size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::capture {

/// Alive from step `first` to step `last`, both included.
struct Lifetime {
  std::int64_t bytes = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

struct ArenaPlan {
  std::vector<std::int64_t> offsets;  ///< of each, multiples of kArenaAlignment
  std::int64_t bytes = 0;             ///< of the block
};

/// As fresh memory of libtorch's is aligned.
inline constexpr std::int64_t kArenaAlignment = 64;

/// The same lifetimes give the same plan.
ArenaPlan plan_arena(const std::vector<Lifetime>& lifetimes);

/// What is wrong with a plan, a line each: offsets that are missing, not aligned or outside, two
/// buffers that share bytes while both are alive.
std::vector<std::string> faults_of(const ArenaPlan& plan, const std::vector<Lifetime>& lifetimes);

}  // namespace tessera::capture
