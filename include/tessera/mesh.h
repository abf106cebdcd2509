// Named meshes: how the ranks of a World are arranged, and which of them form a group on an axis.
//
// A mesh is a value (names, sizes, the ranks in row-major order); the groups behind its axes belong
// to the World and are made on first use, by all ranks together. "axis" is of a mesh, "dim" of a
// tensor. Next: world.h makes meshes, shard.h uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class World;

/// The axis names of the two meshes of design.md, outermost first.
namespace axis {
inline constexpr std::string_view kPipeline = "pp";
inline constexpr std::string_view kReplicate = "dp_replicate";
inline constexpr std::string_view kShard = "dp_shard";
inline constexpr std::string_view kContext = "cp";
inline constexpr std::string_view kTensor = "tp";
inline constexpr std::string_view kExpertData = "dp_shard_mod_ep";
inline constexpr std::string_view kExpert = "ep";
inline constexpr std::string_view kExpertTensor = "etp";
}  // namespace axis

struct MeshAxis {
  std::string name;
  int size = 1;
  bool operator==(const MeshAxis&) const = default;
};

/// The shape alone: pure, printable ("pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 1").
class MeshShape {
 public:
  MeshShape() = default;
  /// Errors: kConfig for a size < 1 or two axes of one name.
  explicit MeshShape(std::vector<MeshAxis> axes);

  /// All axes of the dense mesh; cp above 1 is refused (kConfig).
  static MeshShape dense(int pp, int dp_replicate, int dp_shard, int cp, int tp);
  /// All axes of the sparse (expert) mesh.
  static MeshShape sparse(int pp, int dp_replicate, int expert_data, int ep, int etp);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int size() const;  ///< product of all axes
  bool has(std::string_view name) const;
  int size_of(std::string_view name) const;  ///< 1 for an axis that the mesh does not have
  /// Coordinate of `rank` on `name` (row-major; the last axis varies fastest).
  int coordinate(int rank, std::string_view name) const;
  /// The ranks that differ from `rank` only on the named axes (flattened, in mesh order), ascending
  /// in row-major order: the group of `rank` on these axes.
  std::vector<int> group_of(int rank, const std::vector<std::string_view>& names) const;
  bool operator==(const MeshShape&) const = default;

 private:
  std::vector<MeshAxis> axes_;
};

std::string to_string(const MeshShape& shape);

/// A shape and the World that its ranks belong to: what fully_shard takes.
class Mesh {
 public:
  Mesh() = default;
  /// Errors: kConfig when the shape's size is not the world's.
  Mesh(std::shared_ptr<World> world, MeshShape shape);

  const std::shared_ptr<World>& world() const { return world_; }
  const MeshShape& shape() const { return shape_; }
  int size_of(std::string_view name) const { return shape_.size_of(name); }
  /// This rank's coordinate on an axis.
  int coordinate(std::string_view name) const;

 private:
  std::shared_ptr<World> world_;
  MeshShape shape_;
};

}  // namespace tessera
