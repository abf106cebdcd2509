// Mesh shapes: named axes over the ranks of a run, as values.
//
// The ranks have two readings, dense and sparse, that number them alike, row-major. Pure. "axis" is
// of a mesh, "dim" of a tensor. Next: mesh.h, where a shape gets a World; placement.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/placement.h"

namespace tessera {

/// The axis names of the dense mesh, then those that only the sparse one has, outermost first.
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

/// One reading: printable ("pp 1 x dp_replicate 2 x dp_shard 2 x cp 1 x tp 1").
class MeshShape {
 public:
  MeshShape() = default;
  /// Errors: kConfig for a size < 1 or two axes of one name.
  explicit MeshShape(std::vector<MeshAxis> axes);

  /// All axes of the dense mesh; cp above 1 is refused (kConfig): not yet built.
  static MeshShape dense(int pp, int dp_replicate, int dp_shard, int cp, int tp);
  /// All axes of the sparse (expert) mesh.
  static MeshShape sparse(int pp, int dp_replicate, int expert_data, int ep, int etp);

  const std::vector<MeshAxis>& axes() const { return axes_; }
  int size() const;  ///< product of all axes
  /// Whether it has the axis; "tp_kv/G" and "tp_rep/R" where G or R divides tp.
  bool has(std::string_view name) const { return span_of(name).has_value(); }
  int size_of(std::string_view name) const;  ///< 1 for an axis that the mesh does not have
  /// Coordinate of `rank` on `name` (row-major; the last axis varies fastest); 0 for an axis that
  /// the mesh does not have.
  int coordinate(int rank, std::string_view name) const;
  /// The ranks that differ from `rank` only on the named axes (flattened, in mesh order), ascending
  /// in row-major order: the group of `rank` on these axes. Errors: kConfig for a rank that is not
  /// of the mesh, and for axes that overlap ("tp" with "tp_kv/2").
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

std::string to_string(const MeshShape& shape);

/// Both readings of the ranks of a run: the sparse one splits dp_shard x cp x tp into
/// dp_shard_mod_ep x ep x etp.
class MeshShapes {
 public:
  MeshShapes() = default;
  /// Without experts of their own: the sparse reading is the dense one (ep 1, etp = tp). A shape of
  /// other axes has none.
  MeshShapes(MeshShape dense);  // NOLINT(google-explicit-constructor): one is the short form
  /// Errors: kConfig unless pp and dp_replicate agree and dp_shard x cp x tp = dp_shard_mod_ep x ep
  /// x etp.
  MeshShapes(MeshShape dense, MeshShape sparse);

  const MeshShape& dense() const { return dense_; }
  const MeshShape& sparse() const { return sparse_; }
  const MeshShape& of(MeshKind kind) const { return kind == MeshKind::kDense ? dense_ : sparse_; }
  int size() const { return dense_.size(); }
  /// Whether tp, ep or etp has several ranks: then layers declare their placements.
  bool has_model_axes() const;
  /// Of the reading that has the axis; 1 where none does.
  int size_of(std::string_view name) const;
  int coordinate(int rank, std::string_view name) const;
  std::vector<int> coordinates(int rank, const ParameterLayout& layout) const;
  /// As MeshShape::group_of, in the reading that has all of `names`. Errors: kConfig for an axis
  /// that none has, and for axes that no reading has together.
  std::vector<int> ranks_of(int rank, const std::vector<std::string_view>& names) const;
  /// The ranks that hold one replica of the model, in one pipeline stage, with `rank`.
  std::vector<int> replica_of(int rank) const;
  /// All ranks of the pipeline stage of `rank`.
  std::vector<int> stage_of(int rank) const;
  bool operator==(const MeshShapes&) const = default;

 private:
  const MeshShape& with(std::string_view name) const;

  MeshShape dense_;
  MeshShape sparse_;
};

/// "dense", then the sparse reading where it is another one.
std::string to_string(const MeshShapes& shapes);

/// How the tensor axis lies over `heads` heads of keys and values.
struct HeadAxes {
  MeshAxis heads;   ///< cuts them: S(0); of one rank where they are whole
  MeshAxis copies;  ///< ranks that hold the same ones: (R, P); of one rank where each has its own
};
/// As many heads as ranks or more: "tp" cuts them. Fewer: rank t of tp = head t / R, copy t % R
/// with R = tp / heads, on the axes "tp_kv/heads" and "tp_rep/R". Errors: kConfig unless one
/// divides the other.
HeadAxes tensor_axis_of_heads(int tp, int heads);

}  // namespace tessera
