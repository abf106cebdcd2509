// ModelPlan: the units of a whole sharded model with their buckets, computed without any tensor.
//
// Pure. It has the result of fully_shard for all units (fsdp/runtime/unit.h, fsdp/contracts.h) as
// one value: by the same plan_unit and the same rule for small buckets, so that `tessera inspect
// --contract` shows what a run of any size would do. Next: bucket_plan.h; docs/communication.md for
// who sends what.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/bucket_plan.h"

namespace tessera::layout {

/// A unit by name, with its parameters in registration order.
struct UnitItems {
  std::string name;
  std::vector<PlanItem> items;
};

struct PlannedUnit {
  UnitPlan plan;
  std::vector<PlanItem> items;  ///< bucket by bucket; Placed::parameter is an index into it
};

struct ModelPlan {
  PlanOptions options;
  std::vector<PlannedUnit> units;  ///< the outermost first, as the runtime numbers them
};

/// Whether a bucket of an inner unit moves to the outermost one.
bool is_small(const BucketPlan& bucket, std::int64_t merge_below_bytes);

/// Plans `outermost` around `inner` units: small buckets of inner units are laid out again after
/// the outermost unit's own. Errors: as plan_unit.
ModelPlan plan_model(const UnitItems& outermost, const std::vector<UnitItems>& inner,
                     const PlanOptions& options, std::int64_t merge_below_bytes);

/// Return the bytes that a rank sends to gather all buckets of a unit once, and to reduce them
/// once.
std::int64_t gather_sent_bytes(const PlannedUnit& unit);
std::int64_t reduce_sent_bytes(const PlannedUnit& unit);

/// Returns one line for each unit, two for each bucket and one for each parameter.
std::string to_string(const ModelPlan& plan);
/// Returns a hash that is the same on every rank and machine for equal plans.
std::uint64_t hash(const ModelPlan& plan);

}  // namespace tessera::layout
