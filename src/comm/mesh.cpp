#include "tessera/mesh.h"

#include <utility>

#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera {

Mesh::Mesh(std::shared_ptr<World> world, MeshShapes shapes)
    : world_(std::move(world)), shapes_(std::move(shapes)) {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "mesh: found no world");
  // A shape may be planned with; trained on, every stage would be a whole model of its own.
  for (const auto& [name, built] :
       {std::pair(axis::kPipeline, "pipeline"), {axis::kContext, "context"}}) {
    const int size = shapes_.size_of(name);
    TESSERA_CHECK(size == 1, ErrorKind::kConfig, "mesh: found size ", size, " (axis ", name,
                  "), expected 1; ", built,
                  " parallelism is not yet built; give these ranks to another axis");
  }
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
