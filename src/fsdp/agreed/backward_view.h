// What ranks tell each other when a backward begins. [Note: collective order]
//
// Ranks may use results differently: one drops a branch, another keeps a graph for later. Autograd
// knows when a backward begins which nodes it will run, so each rank says through which units'
// forwards its backward goes; all of them do what any of them needs. Pure: no torch header. Next:
// pass_planner.h (the actions that follow from it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace tessera::fsdp {

struct BackwardView {
  /// Actions done of the backward around this one; 0 for an outermost one.
  std::uint64_t actions_done = 0;
  /// Numbers of the forwards of which some graph lives.
  std::set<std::uint32_t> alive;
  /// By number of the forward, for those that backward goes through: by position of its trace,
  /// whether the unit's parameters are needed there.
  std::map<std::uint32_t, std::vector<bool>> reached;
  bool operator==(const BackwardView&) const = default;
};

/// What all ranks know alike, and a view speaks of.
struct ViewFrame {
  std::size_t actions = 0;  ///< of the backward around this one
  /// By number of each forward that is kept: units in its trace.
  std::map<std::uint32_t, std::size_t> forwards;
};

/// One bit for each thing that a view may say: the bits of which any rank's count are what any of
/// them says, with the most steps. As many for every view of a frame.
std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame);
BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame);

}  // namespace tessera::fsdp
