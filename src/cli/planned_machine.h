// Makes one machine of the options that describe it: the one of --machine, its lines overridden by
// --flops, --bandwidth, --device-memory and --ranks-per-host. Every verb that forecasts goes by it,
// and prints the time of a step so. Next: ../check/machine.h, ../train/step_rates.h,
// ../capture/simulate_plan.h.
#pragma once

#include <string>
#include <string_view>

#include "capture/simulate_plan.h"
#include "check/machine.h"
#include "cli/arguments.h"
#include "train/config/config.h"
#include "train/step_rates.h"

namespace tessera::cli {

/// Without --machine only what the other options say has a value. --flops is of all dtypes,
/// --bandwidth of messages within a host and beyond. Errors: kUsage and kIo for a file that cannot
/// be opened, kConfig with the line for what is no description.
check::Machine machine_of(const PlannedMachine& options);

/// The machines that are shipped are GPUs: where nothing else names a device, a run on one is
/// planned for cuda.
void take_device(const PlannedMachine& options, train::Config& config);

/// Whether a step of `config` on `ranks` has a time on this machine: where its operations a second
/// are known. Errors: kUsage for --flops without training.seq_len; kConfig where the machine lacks
/// a bandwidth that `ranks` need.
bool gives_time(const check::Machine& machine, const PlannedMachine& options,
                const train::Config& config, int ranks);

/// Who says how fast a rank is: "--flops and --bandwidth", "h100", "h100 with --flops".
std::string rates_from(const check::Machine& machine, const PlannedMachine& options);
/// Who says what a rank's memory is: "--device-memory", "memory of h100".
std::string memory_from(const check::Machine& machine, const PlannedMachine& options);

/// A step of `run` that follows `plan`, on this machine, which gives_time().
capture::SimulatedStep step_at(const check::Machine& machine, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic);
/// "  a step by the profile: 3.20 ms, of which ...".
std::string time_line(std::string_view by, const capture::SimulatedStep& step);

}  // namespace tessera::cli
