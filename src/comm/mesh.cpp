#include "tessera/mesh.h"

#include <utility>

#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera {

Mesh::Mesh(std::shared_ptr<World> world, MeshShapes shapes)
    : world_(std::move(world)), shapes_(std::move(shapes)) {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "mesh: found no world");
  TESSERA_CHECK(shapes_.size() == world_->size(), ErrorKind::kConfig, "mesh: found ",
                shapes_.size(), " ranks (", to_string(shapes_), "), expected the world's ",
                world_->size(), "; change the degrees under [parallelism] or the number of ranks");
}

int Mesh::rank() const { return world_ ? world_->rank() : 0; }

int Mesh::coordinate(std::string_view name) const { return shapes_.coordinate(rank(), name); }

std::vector<int> Mesh::coordinates(const ParameterLayout& layout) const {
  return shapes_.coordinates(rank(), layout);
}

std::vector<int> Mesh::ranks_of(const std::vector<std::string_view>& names) const {
  return shapes_.ranks_of(rank(), names);
}

}  // namespace tessera
