// DataAxes: the axes that gradients are summed over, given the layout that a layer declares.
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

/// The axes that gradients are summed over, and the mesh that declared layouts are checked against.
struct DataAxes {
  DataAxes() = default;
  /// The axes of a mesh that has data axes only.
  DataAxes(ReductionPlan data);  // NOLINT(google-explicit-constructor): the plan is all of it
  /// The same from the parts of the plan.
  DataAxes(std::vector<std::string> shard_axes, std::vector<std::string> replica_axes,
           double divide_factor)
      : DataAxes(ReductionPlan{std::move(shard_axes), std::move(replica_axes), divide_factor}) {}
  /// The data axes of both readings of `mesh`. divide_factor none = the number of data ranks
  /// (dp_replicate x dp_shard x cp).
  explicit DataAxes(const MeshShapes& mesh, std::optional<double> divide_factor = std::nullopt);

  ReductionPlan dense;  ///< sums of a parameter that no other axis sums
  MeshShapes mesh;      ///< empty where the mesh has data axes only
};

/// Returns the sums that the gradient of a parameter with this layout needs: the data axes, then
/// the axes on which the layout has (R, P), each once. Errors: kContract, naming `what`, for an
/// axis that the mesh does not have or has in another size, and for an axis of several ranks that
/// the layout leaves out.
ReductionPlan reductions_of(const ParameterLayout& layout, const DataAxes& data,
                            const std::string& what);

}  // namespace tessera
