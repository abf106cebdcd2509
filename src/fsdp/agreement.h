// What ranks tell each other when a backward begins, and what comes of it. [Note: collective order]
//
// Ranks may use results differently: one drops a branch, another keeps a graph for later. Autograd
// knows when a backward begins which nodes it will run, so each rank says through which units'
// forwards its backward goes; all of them do what any of them needs. Pure: no torch header.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera::fsdp {

struct BackwardView {
  /// Steps done of the backward around this one; 0 for an outermost one.
  std::uint64_t steps_done = 0;
  /// Numbers of the forwards of which some graph lives.
  std::set<std::uint32_t> alive;
  /// By number of the forward, for those that backward goes through: by position of its trace,
  /// whether the unit's parameters are needed there.
  std::map<std::uint32_t, std::vector<bool>> reached;
  bool operator==(const BackwardView&) const = default;
};

/// Differs for views that differ.
std::string encode(const BackwardView& view);

/// What all ranks know before they tell each other their views.
struct KnownToAll {
  std::uint64_t steps = 0;  ///< of the backward around this one
  struct Forward {
    std::uint32_t number;
    std::size_t positions;  ///< of its trace
  };
  std::vector<Forward> forwards;
};

/// As bits, so that views are joined on the way: what is set in any of them counts, and of steps
/// the most. As many on every rank.
std::vector<bool> to_bits(const BackwardView& view, const KnownToAll& known);
BackwardView from_bits(const std::vector<bool>& bits, const KnownToAll& known);

}  // namespace tessera::fsdp
