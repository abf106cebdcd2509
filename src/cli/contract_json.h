// JSON of all that the ranks of a run would agree on: contracts with the reason of each value and
// buckets; and of a step's memory, traffic and time. contract_text.h has the same as a person reads
// it. Next: inspect.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "capture/simulate_plan.h"
#include "layout/model_plan.h"
#include "tessera/model_contract.h"
#include "train/context_of_run.h"
#include "train/dry/rank_memory.h"
#include "train/dry/step_traffic.h"
#include "train/pipeline/pipeline_memory.h"

namespace tessera::cli {

using Json = nlohmann::ordered_json;

Json json_of(const GradContract& contract);
Json json_of(const BufferContract& contract);
/// The casts of a unit; a value is null where tensors stay as they come.
Json casts_of(const UnitContract& contract);
Json buckets_of(const layout::PlannedUnit& unit);

/// Activations are null where they are not known.
Json json_of(const train::MemoryTable& table);
Json json_of(const train::PipelineRankMemory& memory, const train::PipelineMemory& whole);

/// The milliseconds of a step, and of what it waits for.
Json json_of(const capture::SimulatedStep& step);

/// Null where rows are not cut; bytes are null where they are not known.
Json json_of(const std::optional<train::ContextOfRun>& context);

/// Adds the bytes that a rank sends in a step; null where they are not known.
void add_traffic(const train::StepTraffic& traffic, Json& whole);

}  // namespace tessera::cli
