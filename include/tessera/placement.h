// Placements: how one tensor lies over one axis of a mesh, and which sums its gradient still owes.
//
// Pure values. A tensor has one Placement per axis of its mesh. Next: contract.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

enum class PlacementKind : std::uint8_t {
  kReplicate,  ///< the same values on every rank; gradients may differ until they are summed
  kShard,      ///< split along `dim`
  kPartial,    ///< every rank holds an addend
  kInvariant,  ///< the same values and the same gradients on every rank
};

struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  int dim = 0;  ///< kShard only
  bool operator==(const Placement&) const = default;
};
std::string to_string(const Placement& placement);  ///< "R", "S(0)", "P", "I"

/// The data axes that a gradient is summed over, each exactly once, and the one division.
struct ReductionPlan {
  std::vector<std::string> shard_axes;    ///< flattened: the reduce-scatter group
  std::vector<std::string> replica_axes;  ///< summed once a step, after it
  double divide_factor = 1.0;
  bool operator==(const ReductionPlan&) const = default;
};
/// "sum over dp_shard, then dp_replicate, / 4"; "no sum" on a single rank.
std::string to_string(const ReductionPlan& reductions);

}  // namespace tessera
