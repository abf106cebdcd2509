// The order of collectives as values. [Note: collective order]
//
// Two equal-size Gloo collectives that are issued in different orders on two ranks exchange each
// other's data without an error. So the order is not what happens to be ready first, nor what this
// rank still has in memory, but one list, a pure function of what all ranks agreed on when the
// backward began: the Trace of each forward that it goes through on some rank, that is the sequence
// in which units were entered and the one in which they were left; the places that it comes by
// (BackwardView); units' options and what is unsharded. backward_plan.h has both and makes the
// list, and every rank does all of it, also where it did not use a result. In forward each rank
// gathers what is not unsharded yet: that is the same everywhere, since backward's list says what
// is released, too. Pure: no torch header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::fsdp {

using UnitId = std::uint32_t;

/// The units in the order in which one forward of the root entered them, and in which it left them.
struct Trace {
  std::vector<UnitId> units;
  std::vector<std::size_t> exits;  ///< positions in `units`, as their forwards ended
  /// By position: the outermost checkpoint that it ran in, counted from 1; 0 for none.
  std::vector<std::uint32_t> checkpoints;
  bool operator==(const Trace&) const = default;
  std::uint64_t hash() const;
};

/// The first place where rank 0's list and that of `rank` differ, in words: "entry 3: rank 0
/// entered layers.3, rank 1 entered layers.4", or "... entered nothing more" for the shorter one.
/// Empty when they agree.
std::string first_difference(const std::vector<std::string>& names_of_first, int rank,
                             const std::vector<std::string>& names);

}  // namespace tessera::fsdp
