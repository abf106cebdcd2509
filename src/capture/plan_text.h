// A plan of a step for a person: each action with its reason. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "capture/passes.h"
#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// Writes a line for each action, place by place, for the micro-batch classes that a step of
/// `micro_batches` has: "  before layers.1: gather layers.1: needed by layers.1". `chosen` has the
/// reasons of choices, where they are known (a file has none).
std::string to_text(const fsdp::StepPlan& plan, const Chosen& chosen, std::int64_t micro_batches);

/// Writes the choices alone, a line for each unit: until when it is kept, what is recomputed, and
/// why. Layers with the same choices share a line.
std::string choices_text(const fsdp::StepPlan& plan, const Chosen& chosen);

}  // namespace tessera::capture
