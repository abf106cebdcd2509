// MeshShape: named axes over the ranks of a run, as a value. Pure.
//
// The ranks have two readings, dense and sparse (for experts), which number them alike, row-major.
// A mesh has axes, a tensor has dims. Next: mesh.h, where a shape gets a World; placement.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/placement.h"

namespace tessera {

/// The axis names of the dense mesh, then those that only the sparse one has, outermost first.
namespace axis {
inline constexpr std::string_view kPipeline = "pp";             ///< pipeline stages
inline constexpr std::string_view kReplicate = "dp_replicate";  ///< data parallel: whole replicas
inline constexpr std::string_view kShard = "dp_shard";          ///< data parallel: shards
inline constexpr std::string_view kContext = "cp";              ///< context parallel
inline constexpr std::string_view kTensor = "tp";               ///< tensor parallel
inline constexpr std::string_view kExpertData = "dp_shard_mod_ep";  ///< shards of experts
inline constexpr std::string_view kExpert = "ep";                   ///< expert parallel
inline constexpr std::string_view kExpertTensor = "etp";            ///< tensor parallel of experts
}  // namespace axis

/// One axis of a mesh.
struct MeshAxis {
  std::string name;  ///< such as "dp_shard"
  int size = 1;      ///< number of ranks along it
  bool operator==(const MeshAxis&) const = default;
};

/// One reading of the ranks; prints as "pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 1".
class MeshShape {
 public:
  MeshShape() = default;
  /// Makes a shape of any axes. Errors: kConfig for a size below 1, and for two axes of one name.
  explicit MeshShape(std::vector<MeshAxis> axes);

  /// Makes the dense mesh. Errors: kConfig for a size below 1.
  static MeshShape dense(int pp, int dp_replicate, int dp_shard, int cp, int tp);
  /// Makes the sparse (expert) mesh. Errors: kConfig for a size below 1.
  static MeshShape sparse(int pp, int dp_replicate, int expert_data, int ep, int etp);

  /// Returns the axes, outermost first.
  const std::vector<MeshAxis>& axes() const { return axes_; }
  int size() const;  ///< product of all axes
  /// Returns whether the mesh has the axis. It has "tp_kv/G" and "tp_rep/R" where G or R divides
  /// tp.
  bool has(std::string_view name) const { return span_of(name).has_value(); }
  int size_of(std::string_view name) const;  ///< 1 for an axis that the mesh does not have
  /// Returns the coordinate of `rank` on `name` (row-major; the last axis varies fastest); 0 for an
  /// axis that the mesh does not have.
  int coordinate(int rank, std::string_view name) const;
  /// Returns the ranks that differ from `rank` only on the named axes, ascending: the group of
  /// `rank` on these axes. Errors: kConfig for a rank outside of the mesh, and for axes that
  /// overlap ("tp" with "tp_kv/2").
  std::vector<int> group_of(int rank, const std::vector<std::string_view>& names) const;
  bool operator==(const MeshShape&) const = default;

 private:
  /// An axis in rank numbers: neighbours on it are `stride` apart.
  struct Span {
    int size = 1;
    int stride = 1;
  };
  std::optional<Span> span_of(std::string_view name) const;
  void check_rank(int rank) const;

  std::vector<MeshAxis> axes_;
};

/// Prints "pp 1 x dp_replicate 2 x ...".
std::string to_string(const MeshShape& shape);

/// Both readings of the ranks of a run: the sparse one splits dp_shard x cp x tp into
/// dp_shard_mod_ep x ep x etp.
class MeshShapes {
 public:
  MeshShapes() = default;
  /// Makes the shapes of a run without expert parallelism: the sparse reading follows from the
  /// dense one (ep 1, etp = tp). A shape of other axes has no sparse reading.
  MeshShapes(MeshShape dense);  // NOLINT(google-explicit-constructor): one is the short form
  /// Makes both readings. Errors: kConfig unless pp and dp_replicate agree and dp_shard x cp x tp =
  /// dp_shard_mod_ep x ep x etp.
  MeshShapes(MeshShape dense, MeshShape sparse);

  /// Returns the dense reading.
  const MeshShape& dense() const { return dense_; }
  /// Returns the sparse reading.
  const MeshShape& sparse() const { return sparse_; }
  /// Returns the reading of that kind.
  const MeshShape& of(MeshKind kind) const { return kind == MeshKind::kDense ? dense_ : sparse_; }
  /// Returns the number of ranks.
  int size() const { return dense_.size(); }
  /// Returns whether tp, ep or etp has several ranks, so that layers declare their placements.
  bool has_model_axes() const;
  /// Returns the size of an axis of either reading; 1 where neither has it.
  int size_of(std::string_view name) const;
  /// Returns the coordinate of `rank` on an axis of either reading; 0 where neither has it.
  int coordinate(int rank, std::string_view name) const;
  /// Returns the coordinate of `rank` on each of layout.axes.
  std::vector<int> coordinates(int rank, const ParameterLayout& layout) const;
  /// Returns MeshShape::group_of() in the reading that has all of `names`. Errors: kConfig for an
  /// axis that neither has, and for axes that no reading has together.
  std::vector<int> ranks_of(int rank, const std::vector<std::string_view>& names) const;
  /// Returns the ranks that hold one replica of the pipeline stage of `rank`, with `rank`.
  std::vector<int> replica_of(int rank) const;
  /// Returns all ranks of the pipeline stage of `rank`.
  std::vector<int> stage_of(int rank) const;
  bool operator==(const MeshShapes&) const = default;

 private:
  const MeshShape& with(std::string_view name) const;

  MeshShape dense_;
  MeshShape sparse_;
};

/// Prints the dense reading, then the sparse one where it differs.
std::string to_string(const MeshShapes& shapes);

/// The axes that shard and copy heads of keys and values over tp.
struct HeadAxes {
  MeshAxis heads;   ///< shards the heads, S(0); of size 1 where they are whole
  MeshAxis copies;  ///< ranks with the same heads, (R, P); of size 1 where no two ranks share heads
};
/// Returns the axes of `heads` heads over `tp` ranks. With tp <= heads, "tp" shards them. With
/// fewer heads than ranks, rank t of tp holds copy t % R of head t / R, where R = tp / heads, on
/// the axes "tp_kv/heads" and "tp_rep/R". Errors: kConfig unless one number divides the other.
HeadAxes tensor_axis_of_heads(int tp, int heads);

}  // namespace tessera
