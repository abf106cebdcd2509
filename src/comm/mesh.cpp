#include "tessera/mesh.h"

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "base/joined.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera {
namespace {

/// Of an axis that nobody knows nobody sums the gradients: each of its ranks would train a model of
/// its own.
void check_axes(const MeshShape& shape, std::initializer_list<std::string_view> known) {
  for (const MeshAxis& one : shape.axes()) {
    if (one.size == 1) continue;
    TESSERA_CHECK(one.name != axis::kContext, ErrorKind::kConfig, "mesh: found size ", one.size,
                  " (axis cp), expected 1; context parallelism is not yet built; give these ranks "
                  "to another axis");
    TESSERA_CHECK(std::find(known.begin(), known.end(), one.name) != known.end(),
                  ErrorKind::kConfig, "mesh: found the axis ", one.name, " of ", one.size,
                  " ranks in ", to_string(shape), ", expected one of ",
                  joined(std::vector<std::string_view>(known)),
                  "; name the axes as MeshShape::dense and MeshShape::sparse do, and give a sparse "
                  "reading beside the dense one");
  }
}

}  // namespace

Mesh::Mesh(std::shared_ptr<World> world, MeshShapes shapes)
    : world_(std::move(world)), shapes_(std::move(shapes)) {
  TESSERA_CHECK(world_ != nullptr, ErrorKind::kUsage, "mesh: found no world");
  // A shape may be planned with; trained on, every stage would be a whole model of its own.
  const int stages = shapes_.size_of(axis::kPipeline);
  TESSERA_CHECK(stages == 1, ErrorKind::kConfig, "mesh: found size ", stages, " (axis ",
                axis::kPipeline,
                "), expected 1; pipeline parallelism is not yet built; give these ranks to another "
                "axis");
  check_axes(shapes_.dense(), {axis::kReplicate, axis::kShard, axis::kTensor});
  if (shapes_.sparse() != shapes_.dense()) {
    check_axes(shapes_.sparse(),
               {axis::kReplicate, axis::kExpertData, axis::kExpert, axis::kExpertTensor});
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
