// Which bucket a parameter belongs to: the part of its contract that decides over the bytes of a
// flat buffer and over the collectives that carry it. Next: layout/bucket_plan.h.
#pragma once

#include "layout/bucket_plan.h"
#include "tessera/contract.h"

namespace tessera {

/// Frozen parameters have no gradient, so what their gradient dtypes would be does not split
/// buckets.
layout::BucketKey key_of(const GradContract& contract);
/// What a rank lays out of it.
layout::PlanItem plan_item(const GradContract& contract);

}  // namespace tessera
