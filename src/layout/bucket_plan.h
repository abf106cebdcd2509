// BucketPlan: the place of every parameter of a unit in the flat buffers that are gathered and
// reduced.
//
// Pure. A unit has one bucket for each distinct BucketKey. A bucket holds whole parameters one
// after the other, each beginning at a multiple of `alignment_bytes` in the compute dtype. Its
// length is a multiple of ranks x 64 elements; rank r owns the r-th equal slice, the same elements
// in every dtype's buffer. Gaps are padding: zero in gradients, in no norm. FSDP2 pads each
// parameter (8x for stacked experts at 64 ranks).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/range.h"
#include "tessera/dtype.h"
#include "tessera/mesh_shape.h"
#include "tessera/placement.h"

namespace tessera::layout {

/// The properties that the parameters of one bucket share. For frozen ones accumulate, reduce and
/// final have no meaning: key_of (grad/contract_key.h) sets them to the compute dtype, so that they
/// share a bucket.
struct BucketKey {
  DType storage = DType::kFloat32;
  DType compute = DType::kFloat32;
  Rounding rounding = Rounding::kNearestEven;  ///< from storage to compute
  DType accumulate = DType::kFloat32;
  DType reduce = DType::kFloat32;
  DType final = DType::kFloat32;
  bool trainable = true;
  bool replicated = false;  ///< frozen and whole on every rank: one slice
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
  int ranks = 1;           ///< number of ranks that share it: 1 where it is replicated
  std::int64_t numel = 0;  ///< size of the flat buffer: a multiple of ranks x 64
  std::vector<Placed> parameters;

  std::int64_t slice_numel() const { return numel / ranks; }
  Range slice(int rank) const;  ///< the rank's elements of the flat buffer
  /// Returns the elements of the parameter that `rank` owns, counted in the parameter; {0, 0} for
  /// none.
  Range owned(const Placed& placed, int rank) const;
  /// Returns where owned(placed, rank) begins in the rank's slice; 0 where the rank owns none of
  /// it.
  std::int64_t offset_in_slice(const Placed& placed, int rank) const;
  bool operator==(const BucketPlan&) const = default;
};

/// Returns the bytes of the flat buffer in the compute dtype.
std::int64_t gathered_bytes(const BucketPlan& bucket);
/// Returns the bytes of the flat buffer in the reduce dtype; 0 for frozen parameters.
std::int64_t reduced_bytes(const BucketPlan& bucket);
/// Returns the bytes of a rank's slice in the storage dtype.
std::int64_t shard_bytes(const BucketPlan& bucket);
std::int64_t padding_numel(const BucketPlan& bucket);
/// Returns the bytes that one rank sends to gather or reduce a buffer of `bytes`.
std::int64_t sent_bytes(std::int64_t bytes, int ranks);

struct UnitPlan {
  std::string name;
  std::vector<BucketPlan> buckets;  ///< in order of first appearance of their keys
  bool operator==(const UnitPlan&) const = default;
};

struct PlanOptions {
  int ranks = 1;                      ///< of the data axes dp_shard x cp
  std::int64_t alignment_bytes = 64;  ///< of each parameter, in the compute dtype; 256 on CUDA
  /// The sizes of the axes that a bucket lies over; empty = every bucket lies over `ranks`.
  MeshShapes mesh = {};

  /// Returns the number of ranks that share a bucket: those on its shard axes, one where it is
  /// replicated.
  int ranks_of(const BucketKey& key) const;
};

/// A parameter as the plan sees it.
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

/// Throws kInternal unless the plan has the properties of this header: alignment, no overlap,
/// slices that cover the buffer, each item exactly once and in order, keys that agree with the
/// items and differ between buckets.
void validate(const UnitPlan& plan, const std::vector<PlanItem>& items, const PlanOptions& options);

/// Returns two lines for each bucket and one for each parameter: the text that `tessera inspect
/// --contract` prints below the contract.
std::string to_string(const UnitPlan& plan, const std::vector<PlanItem>& items);

}  // namespace tessera::layout
