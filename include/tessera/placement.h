// Placement: how a tensor is laid out over one axis of a mesh, and which sums its gradient needs.
//
// Pure values. A tensor has one Placement for each axis of its mesh. Next: contract.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// How a tensor is laid out over an axis.
enum class PlacementKind : std::uint8_t {
  kReplicate,  ///< the same values on every rank; gradients may differ until they are summed
  kShard,      ///< split along Placement::dim
  kPartial,    ///< every rank holds an addend
  kInvariant,  ///< the same values and the same gradients on every rank
};

/// A kind of layout, with the dim of a shard.
struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;  ///< the kind
  int dim = 0;                                     ///< dim of the tensor; kShard only
  bool operator==(const Placement&) const = default;
};
std::string to_string(const Placement& placement);  ///< "R", "S(0)", "P", "I"

/// The mesh that an axis belongs to: two readings of the same ranks (mesh_shape.h).
enum class MeshKind : std::uint8_t {
  kDense,   ///< pp, dp_replicate, dp_shard, cp, tp
  kSparse,  ///< pp, dp_replicate, dp_shard_mod_ep, ep, etp: experts
};

/// The placements of one parameter and of its raw gradient on one axis of its mesh. Three pairs are
/// possible: (R, P), whose gradient is summed over the axis; (S(d), S(d)) and (I, I), whose
/// gradients are not.
struct AxisPlacement {
  /// "tp", "ep", "etp"; "tp_kv/2", "tp_rep/4" (tensor_axis_of_heads() in mesh_shape.h).
  std::string axis;
  int size = 1;         ///< number of ranks along the axis
  Placement parameter;  ///< placement of the parameter
  Placement gradient;   ///< placement of the gradient that a backward gives

  static AxisPlacement shard(std::string_view axis, int size, int dim);  ///< (S(dim), S(dim))
  static AxisPlacement partial(std::string_view axis, int size);         ///< (R, P)
  static AxisPlacement invariant(std::string_view axis, int size);       ///< (I, I)
  /// The old name of shard(); deprecated.
  [[deprecated("shard()")]] static AxisPlacement cut(std::string_view axis, int size, int dim) {
    return shard(axis, size, dim);
  }
  /// The old name of partial(); deprecated.
  [[deprecated("partial()")]] static AxisPlacement summed(std::string_view axis, int size) {
    return partial(axis, size);
  }
  bool operator==(const AxisPlacement&) const = default;
};
/// Prints "tp 2 R, gradient P".
std::string to_string(const AxisPlacement& placement);

/// The placements of a parameter beyond the data axes, as the layer that owns it declares them. The
/// same on every rank; empty = whole on every rank of a mesh that has data axes only.
struct ParameterLayout {
  MeshKind mesh = MeshKind::kDense;  ///< the mesh of `axes`
  /// The shape that the placements' dims count in: a view of the global shape, with the same
  /// elements in the same order. [E, 2I, H] with gates and ups is sharded as [E, 2, I, H]. Empty =
  /// the global shape.
  std::vector<std::int64_t> sharded_shape = {};
  std::vector<AxisPlacement> axes = {};  ///< axes of more than one rank, outermost first
  /// Sizes of consecutive sections of dim 0 that are sharded separately: the rows [q | k | v] of
  /// one matrix, where a rank holds its heads of each. Empty = one section. With sections
  /// `sharded_shape` is empty.
  std::vector<std::int64_t> sections = {};
  bool operator==(const ParameterLayout&) const = default;
};

/// Prints "tp 2 S(0), gradient S(0)", axis by axis; "nothing declared" for an empty layout.
std::string to_string(const ParameterLayout& layout);

/// The interface of a module that splits its work over tp, ep or etp: it declares the placements of
/// its parameters and of their raw gradients there. Its tensors are the local ones.
class DeclaresLayouts {
 public:
  virtual ~DeclaresLayouts() = default;
  /// Returns the layout of a parameter by the name under which this module itself registered it
  /// ("weight"); submodules declare their own.
  virtual ParameterLayout layout_of(const std::string& parameter) const = 0;

 protected:
  DeclaresLayouts() = default;
  DeclaresLayouts(const DeclaresLayouts&) = default;
  DeclaresLayouts& operator=(const DeclaresLayouts&) = default;
};

/// The axes that a gradient is summed over, each exactly once, and the one division.
struct ReductionPlan {
  std::vector<std::string> shard_axes;    ///< together the group of the reduce-scatter
  std::vector<std::string> replica_axes;  ///< summed once a step, after shard_axes
  double divide_factor = 1.0;             ///< divides the sum
  /// Coordinates on axis pp whose ranks each hold a copy (a tied embedding at both ends of a
  /// pipeline). Their sums are added once a step, in this order, with the replicas'. Empty = one
  /// stage holds it.
  std::vector<int> copies = {};
  bool operator==(const ReductionPlan&) const = default;
};
/// Returns whether a factor may divide gradients: above 0, and exact in float32.
bool is_divisor(double factor);
/// Prints "sum over dp_shard, then dp_replicate, / 4"; "no sum" on a single rank.
std::string to_string(const ReductionPlan& reductions);

}  // namespace tessera
