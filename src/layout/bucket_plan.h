// Bucket plan: where every parameter of a unit lies in the flat buffers that are gathered and
// reduced.
//
// Pure. A unit owns one bucket per distinct BucketKey; in a bucket parameters lie one after the
// other, whole, each beginning at `alignment_bytes` of the compute dtype. The length is a multiple
// of ranks x 64 elements; rank r owns the r-th equal slice, the same elements in every dtype's
// buffer. Gaps are padding: zero in gradients, in no norm. Compare FSDP2's per-parameter
// padding (8x for stacked experts at 64 ranks).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/range.h"
#include "tessera/dtype.h"
#include "tessera/mesh_shape.h"
#include "tessera/placement.h"

namespace tessera::layout {

/// What parameters of one bucket have in common. For frozen ones accumulate, reduce and final have
/// no meaning: key_of (grad/contract_key.h) sets them to the compute dtype, so that they share a
/// bucket.
struct BucketKey {
  DType storage = DType::kFloat32;
  DType compute = DType::kFloat32;
  Rounding rounding = Rounding::kNearestEven;  ///< from storage to compute
  DType accumulate = DType::kFloat32;
  DType reduce = DType::kFloat32;
  DType final = DType::kFloat32;
  bool trainable = true;
  bool replicated = false;  ///< frozen and whole on every rank: one slice, whatever the ranks
  ReductionPlan reductions;
  bool operator==(const BucketKey&) const = default;
};
std::string to_string(const BucketKey& key);

/// The length of a bucket is a multiple of ranks x this, so that every slice begins on a cache line
/// in every dtype.
inline constexpr std::int64_t kSliceQuantum = 64;

struct Placed {
  std::size_t parameter = 0;  ///< index into the items that the plan was made from
  std::int64_t offset = 0;    ///< first element in the flat buffer
  std::int64_t numel = 0;
  bool operator==(const Placed&) const = default;
};

struct BucketPlan {
  BucketKey key;
  int ranks = 1;           ///< that share it: 1 where the key says replicated
  std::int64_t numel = 0;  ///< of the flat buffer: a multiple of ranks x 64
  std::vector<Placed> parameters;

  std::int64_t slice_numel() const { return numel / ranks; }
  Range slice(int rank) const;  ///< rank's elements of the flat buffer
  /// The elements of the parameter (0-based within it) that `rank` owns; {0, 0} when none.
  Range owned(const Placed& placed, int rank) const;
  /// Where owned(placed, rank) begins within the rank's slice; 0 when the rank owns none of it.
  std::int64_t offset_in_slice(const Placed& placed, int rank) const;
  bool operator==(const BucketPlan&) const = default;
};

/// Unsharded bytes: the flat buffer in the compute dtype.
std::int64_t gathered_bytes(const BucketPlan& bucket);
/// The flat buffer on the wire; 0 for frozen parameters.
std::int64_t reduced_bytes(const BucketPlan& bucket);
/// The slice that a rank keeps, in the storage dtype.
std::int64_t shard_bytes(const BucketPlan& bucket);
std::int64_t padding_numel(const BucketPlan& bucket);
/// What one rank sends of a buffer of `bytes` in a gather or in a reduction.
std::int64_t sent_bytes(std::int64_t bytes, int ranks);

struct UnitPlan {
  std::string name;
  std::vector<BucketPlan> buckets;  ///< in order of first appearance of their keys
  bool operator==(const UnitPlan&) const = default;
};

struct PlanOptions {
  int ranks = 1;                      ///< of the data axes dp_shard x cp
  std::int64_t alignment_bytes = 64;  ///< of each parameter, in the compute dtype; 256 on CUDA
  /// Where the sizes of a bucket's own axes are found; empty = every bucket lies over `ranks`.
  MeshShapes mesh = {};

  /// That share a bucket: those on its shard axes, one where it is replicated.
  int ranks_of(const BucketKey& key) const;
};

/// What the plan needs to know of a parameter.
struct PlanItem {
  std::string name;
  std::int64_t numel = 0;
  BucketKey key;
};

/// Items keep their order within their bucket. Items without elements are placed (numel 0) but take
/// no room. Errors: kInternal for negative sizes, sizes that add up to more than 2^63 bytes, less
/// than one rank, an alignment that is no multiple of the element size.
UnitPlan plan_unit(const std::string& name, const std::vector<PlanItem>& items,
                   const PlanOptions& options);

/// Throws kInternal unless the plan holds what its head promises: alignment, no overlap, slices
/// that cover, each item exactly once and in order, keys that agree with the items and differ
/// between buckets.
void validate(const UnitPlan& plan, const std::vector<PlanItem>& items, const PlanOptions& options);

/// Two lines a bucket and one a parameter: what `tessera inspect --contract` prints below the
/// contract.
std::string to_string(const UnitPlan& plan, const std::vector<PlanItem>& items);

}  // namespace tessera::layout
