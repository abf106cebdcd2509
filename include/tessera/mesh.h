// Named meshes: how the ranks of a World are arranged, and which of them form a group on an axis.
//
// A mesh is a value (names, sizes, the ranks in row-major order); the groups behind its axes belong
// to the World and are made on first use, by all ranks together. Next: world.h makes meshes,
// shard.h uses them, group.h has collectives of one's own along their axes.
#pragma once

#include <initializer_list>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/mesh_shape.h"

namespace tessera {

class Group;
class World;

/// Shapes and the World that their ranks belong to: what fully_shard takes.
class Mesh {
 public:
  Mesh() = default;
  /// Ranks that differ on pp have models of their own, stages of a whole: pipeline.h runs them.
  /// Errors: kConfig when the shape's size is not the world's, and for cp above 1: not yet built.
  Mesh(std::shared_ptr<World> world, MeshShapes shapes);

  const std::shared_ptr<World>& world() const { return world_; }
  const MeshShape& shape() const { return shapes_.dense(); }
  const MeshShapes& shapes() const { return shapes_; }
  /// Of either reading; 1 for an axis that none has.
  int size_of(std::string_view name) const { return shapes_.size_of(name); }
  /// This rank's coordinate on an axis of either reading.
  int coordinate(std::string_view name) const;
  /// This rank's coordinate on each of layout.axes.
  std::vector<int> coordinates(const ParameterLayout& layout) const;
  /// The ranks that differ from this one only on the named axes, ascending: what World::group
  /// takes. Errors: as MeshShapes::ranks_of.
  std::vector<int> ranks_of(const std::vector<std::string_view>& names) const;

  /// Collectives (group.h) among the ranks that differ from this one only on the axis, or on the
  /// axes together ({"dp_replicate", "dp_shard"}). Collective among them when they first have a
  /// group. Errors: as ranks_of; kUsage for a mesh without a World; kComm.
  Group group(std::string_view axis) const;
  Group group(std::initializer_list<std::string_view> axes) const;

 private:
  int rank() const;

  std::shared_ptr<World> world_;
  MeshShapes shapes_;
};

}  // namespace tessera
