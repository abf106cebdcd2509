// Mesh: the ranks of a World arranged along named axes, and the groups that they form.
//
// A mesh is a value (names, sizes, the ranks in row-major order). The groups of its axes belong to
// the World and are made on first use, by all ranks together. Next: world.h makes meshes, shard.h
// uses them, group.h has collectives along their axes.
#pragma once

#include <initializer_list>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/mesh_shape.h"

namespace tessera {

class Group;
class World;

/// Mesh shapes and the World that their ranks belong to, as fully_shard() takes them.
class Mesh {
 public:
  Mesh() = default;
  /// Arranges the ranks of `world`. Ranks that differ on axis pp hold different stages of a model
  /// (pipeline.h); ranks that differ on axis cp alone have the same rows, and parameters are sharded
  /// over dp_shard x cp. Errors: kConfig where the shape's size is not the world's.
  Mesh(std::shared_ptr<World> world, MeshShapes shapes);

  /// Returns the World.
  const std::shared_ptr<World>& world() const { return world_; }
  /// Returns the dense reading of the ranks.
  const MeshShape& shape() const { return shapes_.dense(); }
  /// Returns both readings of the ranks.
  const MeshShapes& shapes() const { return shapes_; }
  /// Returns the size of an axis of either reading; 1 for an axis that neither has.
  int size_of(std::string_view name) const { return shapes_.size_of(name); }
  /// Returns this rank's coordinate on an axis of either reading.
  int coordinate(std::string_view name) const;
  /// Returns this rank's coordinate on each of layout.axes.
  std::vector<int> coordinates(const ParameterLayout& layout) const;
  /// Returns the ranks that differ from this one only on the named axes, ascending, for
  /// World::group(). Errors: as MeshShapes::ranks_of().
  std::vector<int> ranks_of(const std::vector<std::string_view>& names) const;

  /// Returns the group (group.h) of the ranks that differ from this one only on the axis.
  /// Collective among them the first time. Errors: as ranks_of(); kUsage for a mesh without a
  /// World; kComm.
  Group group(std::string_view axis) const;
  /// The same for several axes together: {"dp_replicate", "dp_shard"}.
  Group group(std::initializer_list<std::string_view> axes) const;

 private:
  int rank() const;

  std::shared_ptr<World> world_;
  MeshShapes shapes_;
};

}  // namespace tessera
