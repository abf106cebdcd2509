// How long a step takes, as a person reads it: by a profile, or by what --flops and --bandwidth say of a
// rank. Next: ../train/step_rates.h, ../capture/simulate_plan.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "capture/simulate_plan.h"
#include "cli/arguments.h"
#include "train/config/config.h"
#include "train/step_rates.h"

namespace tessera::cli {

/// "  a step by the profile: 3.20 ms, of which ...".
std::string time_line(std::string_view by, const capture::SimulatedStep& step);

/// None where nobody gives them. Errors: kUsage without training.seq_len.
std::optional<train::Rates> rates_of(const PlannedMachine& machine, const train::Config& config);

/// The line of a step of `run` that follows `plan`, at these rates.
std::string time_line(const train::Rates& rates, const train::RunOfPlan& run,
                      const fsdp::StepPlan& plan, const train::StepTraffic& traffic);

}  // namespace tessera::cli
