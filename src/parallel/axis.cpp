#include "parallel/axis.h"

#include "comm/group.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::parallel {

Axis axis_of(const Mesh& mesh, std::string_view name, std::optional<at::ScalarType> reduce) {
  Axis axis;
  axis.name = name;
  axis.size = mesh.size_of(name);
  axis.reduce = reduce;
  axis.gives_turn = name == axis::kExpert;
  if (axis.alone()) return axis;
  axis.rank = mesh.coordinate(name);
  axis.group = mesh.world()->group(mesh.ranks_of({name}), concat("transitions on ", name));
  return axis;
}

}  // namespace tessera::parallel
