// What ranks tell each other when a backward begins, and what comes of it. [Note: collective order]
//
// Ranks may use results differently: one drops a branch, another keeps a graph for later. Autograd
// knows when a backward begins which nodes it will run, so each rank says through which units'
// forwards its backward goes; all of them do what any of them needs. Pure: no torch header.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

std::string encode(const BackwardView& view);
/// None for anything that encode() does not write.
std::optional<BackwardView> decode_backward_view(const std::string& bytes);

/// What any of them says; the most steps. Views of one forward have one length.
BackwardView unite(const std::vector<BackwardView>& views);

}  // namespace tessera::fsdp
