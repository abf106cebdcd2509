// Finding: something that a check found wrong in a run, by its place and with the mend.
//
// Pure. Next: values.h, seen_transitions.h, rank_order.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::check {

enum class FindingKind : std::uint8_t {
  kContract,    ///< a contract says something else than the policy or the layer
  kTransition,  ///< a transition between placements does not do what it is for
  kForward,     ///< a unit returns another result than on one rank
  kBackward,    ///< a unit gives another gradient to what is before it
  kGradient,    ///< a parameter's gradient is another one
  kInvariance,  ///< what must be the same on the ranks of an axis is not
  kNumber,      ///< a number of the step (loss, norm, a bias) is another one
  kDtype,       ///< something has another dtype than its contract
  kOrder,       ///< ranks issue different collectives
  kMemory,      ///< a rank takes more memory than it has
  kRefused,     ///< the run is refused or fails
};
std::string_view to_string(FindingKind kind);  ///< "contract", "transition", ...

struct Finding {
  FindingKind kind = FindingKind::kContract;
  std::string operation = {};  ///< "all_reduce of leave, forward"; empty where none is known
  std::string unit = {};       ///< "model.layers.0"
  std::string parameter = {};  ///< canonical name
  std::string axis = {};       ///< "tp"; axes that only together go wrong: "dp_shard x tp"
  std::string found = {};
  std::string expected = {};
  std::string mend = {};
  bool operator==(const Finding&) const = default;
};

/// One line: "transition: all_reduce of leave, forward, in unit model.layers.0, over tp: found ...,
/// expected ...; mend".
std::string to_string(const Finding& finding);

/// The mend of ranks whose order is not the same.
inline constexpr const char* kMendOfOrder = "look for a branch that ranks take differently";

/// Adds `from` behind `to`.
void append(std::vector<Finding>& to, std::vector<Finding> from);

}  // namespace tessera::check
