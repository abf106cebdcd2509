// Prints how long a step takes: by a profile, or by the rates of --flops and --bandwidth. Next: ../train/step_rates.h, ../capture/simulate_plan.h.
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

/// None where the options are not given. Errors: kUsage without training.seq_len.
std::optional<train::Rates> rates_of(const PlannedMachine& machine, const train::Config& config);

/// A step of `run` that follows `plan`, at these rates.
capture::SimulatedStep step_at(const train::Rates& rates, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic);

inline constexpr std::string_view kByRates = "--flops and --bandwidth";

}  // namespace tessera::cli
