// What a run would agree on, as JSON: contracts with the reason of each value, buckets, and what a step
// takes of a rank's memory and sends. contract_text.h has the same as a person reads it. Next:
// inspect.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "layout/model_plan.h"
#include "tessera/model_contract.h"
#include "train/pipeline/pipeline_memory.h"
#include "train/rank_memory.h"
#include "train/step_traffic.h"

namespace tessera::cli {

using Json = nlohmann::ordered_json;

Json json_of(const GradContract& contract);
Json json_of(const BufferContract& contract);
/// What a unit casts; a value is null where tensors stay as they come.
Json casts_of(const UnitContract& contract);
Json buckets_of(const layout::PlannedUnit& unit);

/// Activations are null where they are not known.
Json json_of(const train::MemoryTable& table);
Json json_of(const train::PipelineRankMemory& memory, bool knows_activations);

/// Adds what a rank sends in a step; null what is not known.
void add_traffic(const train::StepTraffic& traffic, Json& whole);

}  // namespace tessera::cli
