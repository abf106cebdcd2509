// The differences between two plans of a step, as text. Pure.
#pragma once

#include <string>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// Returns a line for each difference, "before, after": order, units, choices, what was recorded,
/// and of each pass its first action that differs. Empty only for equal plans.
std::vector<std::string> diff(const fsdp::StepPlan& before, const fsdp::StepPlan& after);

}  // namespace tessera::capture
