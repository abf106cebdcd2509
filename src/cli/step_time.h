// Prints how long a step takes, by a profile or on a described machine. Next: planned_machine.h,
// ../train/step_rates.h, ../capture/simulate_plan.h.
#pragma once

#include <string>
#include <string_view>

#include "capture/simulate_plan.h"
#include "check/machine.h"
#include "train/step_rates.h"

namespace tessera::cli {

/// "  a step by the profile: 3.20 ms, of which ...".
std::string time_line(std::string_view by, const capture::SimulatedStep& step);

/// A step of `run` that follows `plan`, on this machine, which gives_time().
capture::SimulatedStep step_at(const check::Machine& machine, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic);

}  // namespace tessera::cli
