// Data axes: which axes a parameter's gradient is summed over, given what its layer declares.
//
// Pure. Next: contract.h.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh_shape.h"
#include "tessera/placement.h"

namespace tessera {

/// The axes over which gradients are summed, and what declared layouts are checked against.
struct DataAxes {
  DataAxes() = default;
  /// Of a mesh that has no others.
  DataAxes(ReductionPlan data);  // NOLINT(google-explicit-constructor): the plan is all of it
  DataAxes(std::vector<std::string> shard_axes, std::vector<std::string> replica_axes,
           double divide_factor)
      : DataAxes(ReductionPlan{std::move(shard_axes), std::move(replica_axes), divide_factor}) {}
  /// Of both readings. none: the factor is the number of data ranks (dp_replicate x dp_shard x cp).
  explicit DataAxes(const MeshShapes& mesh, std::optional<double> divide_factor = std::nullopt);

  ReductionPlan dense;  ///< of a parameter that no other axis sums
  MeshShapes mesh;      ///< empty where nothing is known of it: then there are no other axes
};

/// Each axis once: those of data, then those on which the layout has (R, P). Errors: kContract,
/// naming `what`, for an axis that the mesh does not have or not of that size, and for one of
/// several ranks that the layout leaves out.
ReductionPlan reductions_of(const ParameterLayout& layout, const DataAxes& data,
                            const std::string& what);

}  // namespace tessera
