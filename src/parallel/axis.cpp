#include "parallel/axis.h"

#include <algorithm>

#include "comm/group.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::parallel {

Axis axis_of(const Mesh& mesh, std::string_view name, std::optional<at::ScalarType> reduce) {
  Axis axis;
  axis.name = name;
  axis.size = mesh.size_of(name);
  axis.reduce = reduce;
  if (axis.alone()) return axis;
  axis.rank = mesh.coordinate(name);
  axis.group = mesh.world()->group(mesh.ranks_of({name}), concat("transitions on ", name));
  return axis;
}

Part part_of(std::int64_t total, int size, int rank) {
  const std::int64_t each = total / size;
  const std::int64_t more = total % size;
  return {each * rank + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

}  // namespace tessera::parallel
