// The order of collectives as values. [Note: collective order]
//
// Two equal-size Gloo collectives that are issued in different orders on two ranks exchange each
// other's data without an error. So the order is not what happens to be ready first but a pure
// function of what all ranks agreed on: the Trace of one forward of the root, that is the sequence
// in which units were entered and the one in which they were left. Backward gathers follow the
// second in reverse (so an outer unit comes before what is inside it), reductions the first entries
// in reverse; a unit that is ready early waits for its turn, one that is never ready is issued when
// the backward ends. Whether an entry gathers at all depends on the trace and on the units' options
// only, never on what this rank still has in memory. Pure: no torch header.
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
  bool operator==(const Trace&) const = default;
  std::uint64_t hash() const;
};

/// What one backward over a trace issues.
struct BackwardOrder {
  /// Positions of the trace in reverse of their exits, those that have not exited first: one gather
  /// each, where `gathers` is set.
  std::vector<std::size_t> positions;
  std::vector<std::size_t> places;  ///< by position of the trace: its index in `positions`
  std::vector<bool> gathers;        ///< by position of the trace
  /// Positions in the order in which their gathers go out: that of `positions`, but for units whose
  /// user named what follows them.
  std::vector<std::size_t> issues;
  std::vector<std::size_t> needed;  ///< by place: how many of `issues` are out before it computes
  std::vector<std::size_t> ahead;   ///< by place: how many are out while it computes
  /// Each unit once, in reverse of its first entry.
  std::vector<UnitId> reductions;
};

/// `reshards[u]`: unit u gives its memory back after its forward. `keep_last`: the trace's last
/// entry kept its memory, because its backward comes first. `prefetch[u]`, where there is one: the
/// units whose gathers go out while u computes; empty = the one that comes after it. Units that do
/// not come after it, or are under way already, are left out. `reached`, by position of the trace:
/// whether backward comes there at all; empty = everywhere.
BackwardOrder backward_order(const Trace& trace, const std::vector<bool>& reshards, bool keep_last,
                             const std::vector<std::vector<UnitId>>& prefetch = {},
                             const std::vector<bool>& reached = {});

/// The first place where two ranks' lists differ, in words: "entry 3: rank 0 entered layers.3,
/// rank 1 entered layers.4", or "... entered nothing more" for the shorter one. Empty when they
/// agree.
std::string first_difference(const std::vector<std::vector<std::string>>& names_by_rank);

}  // namespace tessera::fsdp
