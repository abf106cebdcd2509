// The contracts that a run carries, compared with those of its policy and with what every contract
// has to keep to.
//
// The second half is worked out here from placements and meshes alone: each axis on which a
// gradient is partial is summed over once, and no other; one divide factor for all; nothing is
// accumulated narrower than it travels. Pure. Next: ../grad/resolve.h, finding.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "check/finding.h"
#include "tessera/mesh_shape.h"
#include "tessera/model_contract.h"

namespace tessera::check {

/// `carried`: of the parameters that a rank has; `resolved`: of the whole model, by policy and
/// layers.
std::vector<Finding> wrong_contracts(const ModelContract& carried, const ModelContract& resolved,
                                     const MeshShapes& mesh);

/// The dtype in which a rank was seen to send or keep something of a unit.
struct SeenDtype {
  std::string unit = {};
  std::string what = {};   ///< "reduction", "gather"
  std::string dtype = {};  ///< "bfloat16"
};
/// Compares them with the contracts of the unit's parameters. `units`: by parameter, its unit ("" =
/// the root), in the order of contract.parameters.
std::vector<Finding> wrong_wires(const std::vector<SeenDtype>& seen, const ModelContract& contract,
                                 const std::vector<std::string>& units);

}  // namespace tessera::check
