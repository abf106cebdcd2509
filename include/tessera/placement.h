// Placements: how one tensor lies over one axis of a mesh, and which sums its gradient still owes.
//
// Pure values. A tensor has one Placement per axis of its mesh. Next: contract.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class PlacementKind : std::uint8_t {
  kReplicate,  ///< the same values on every rank; gradients may differ until they are summed
  kShard,      ///< split along `dim`
  kPartial,    ///< every rank holds an addend
  kInvariant,  ///< the same values and the same gradients on every rank
};

struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  int dim = 0;  ///< kShard only
  bool operator==(const Placement&) const = default;
};
std::string to_string(const Placement& placement);  ///< "R", "S(0)", "P", "I"

/// The mesh that an axis belongs to: two readings of the same ranks (mesh_shape.h).
enum class MeshKind : std::uint8_t {
  kDense,   ///< pp, dp_replicate, dp_shard, cp, tp
  kSparse,  ///< pp, dp_replicate, dp_shard_mod_ep, ep, etp: experts
};

/// How one parameter lies over one axis of its mesh, and what its raw gradient is there. Three
/// pairs are possible: (R, P), which the sink sums over the axis; (S(d), S(d)) and (I, I), which
/// nothing sums there.
struct AxisPlacement {
  /// "tp", "ep", "etp"; "tp_kv/2", "tp_rep/4" (tensor_axis_of_heads in mesh_shape.h).
  std::string axis;
  int size = 1;
  Placement parameter;
  Placement gradient;

  static AxisPlacement shard(std::string_view axis, int size, int dim);  ///< (S(dim), S(dim))
  static AxisPlacement partial(std::string_view axis, int size);         ///< (R, P)
  static AxisPlacement invariant(std::string_view axis, int size);       ///< (I, I)
  [[deprecated("shard()")]] static AxisPlacement cut(std::string_view axis, int size, int dim) {
    return shard(axis, size, dim);
  }
  [[deprecated("partial()")]] static AxisPlacement summed(std::string_view axis, int size) {
    return partial(axis, size);
  }
  bool operator==(const AxisPlacement&) const = default;
};
/// "tp 2 R, gradient P".
std::string to_string(const AxisPlacement& placement);

/// Where a parameter lies beyond the data axes: what the layer that owns it declares. The same on
/// every rank; empty = whole on every rank of a mesh that has data axes only.
struct ParameterLayout {
  MeshKind mesh = MeshKind::kDense;
  /// The shape whose dims the placements count: as many elements in the same order as the global
  /// shape, which it is where it is empty. [E, 2I, H] that holds gates and ups is cut as
  /// [E, 2, I, H].
  std::vector<std::int64_t> sharded_shape = {};
  std::vector<AxisPlacement> axes = {};  ///< of more than one rank, outermost first
  /// The sizes of parts that stand one behind the other along dim 0 and are sharded each by itself:
  /// [q | k | v] rows of one matrix, of which a rank holds its heads of each. Empty = dim 0 is one
  /// part. With sections `sharded_shape` is empty.
  std::vector<std::int64_t> sections = {};
  bool operator==(const ParameterLayout&) const = default;
};

/// "tp 2 S(0), gradient S(0)", axis by axis; "nothing declared" for an empty one.
std::string to_string(const ParameterLayout& layout);

/// What a module that splits its work over tp, ep or etp is beside torch::nn::Module: it says where
/// its own parameters lie there and what their raw gradients are. Its tensors are the local ones.
class DeclaresLayouts {
 public:
  virtual ~DeclaresLayouts() = default;
  /// `parameter` as it was registered in this very module ("weight"), not in one inside.
  virtual ParameterLayout layout_of(const std::string& parameter) const = 0;

 protected:
  DeclaresLayouts() = default;
  DeclaresLayouts(const DeclaresLayouts&) = default;
  DeclaresLayouts& operator=(const DeclaresLayouts&) = default;
};

/// The axes that a gradient is summed over, each exactly once, and the one division.
struct ReductionPlan {
  std::vector<std::string> shard_axes;    ///< flattened: the reduce-scatter group
  std::vector<std::string> replica_axes;  ///< summed once a step, after it
  double divide_factor = 1.0;
  /// Coordinates on axis pp whose ranks hold a copy each (a tied embedding at both ends of a
  /// pipeline): their sums are added once a step, in this order, with the replicas'. Empty: one
  /// stage has it.
  std::vector<int> copies = {};
  bool operator==(const ReductionPlan&) const = default;
};
/// Whether gradients may be divided by it: above 0, and a number that float32 has in full.
bool is_divisor(double factor);
/// "sum over dp_shard, then dp_replicate, / 4"; "no sum" on a single rank.
std::string to_string(const ReductionPlan& reductions);

}  // namespace tessera
