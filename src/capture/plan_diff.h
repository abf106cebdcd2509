// What is different between two plans of a step, in words. Pure.
#pragma once

#include <string>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::capture {

/// A line a difference, "before, after": order, units, choices, what was recorded, and of each pass
/// its first action that is another. Empty for equal plans, and for those alone.
std::vector<std::string> diff(const fsdp::StepPlan& before, const fsdp::StepPlan& after);

}  // namespace tessera::capture
