// The bucket plan of a sharded model as the value that it was laid out from: for printing and
// comparing.
#pragma once

#include "layout/model_plan.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// Of the whole tree under `model`, which is the outermost handle. Not collective.
layout::ModelPlan plan_of(const ShardedBase& model);

}  // namespace tessera::fsdp
