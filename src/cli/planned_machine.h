// Makes one machine of the options that describe it: the one of --machine, its lines overridden by
// --flops, --bandwidth, --device-memory and --ranks-per-host. Every verb that forecasts goes by it.
// Next: ../check/machine.h.
#pragma once

#include <string>

#include "check/machine.h"
#include "cli/arguments.h"
#include "train/config/config.h"

namespace tessera::cli {

/// Without --machine only what the other options say has a value. --flops is of all dtypes,
/// --bandwidth of messages within a host and beyond. Errors: kUsage and kIo for a file that cannot be
/// opened, kConfig with the line for what is no description.
check::Machine machine_of(const PlannedMachine& options);

/// Whether a step of `config` on `ranks` has a time on this machine: where its operations a second
/// are known. Errors: kUsage for --flops without training.seq_len; kConfig where the machine lacks a
/// bandwidth that `ranks` need.
bool gives_time(const check::Machine& machine, const PlannedMachine& options,
                const train::Config& config, int ranks);

/// Who says how fast a rank is: "--flops and --bandwidth", "h100", "h100 with --flops".
std::string rates_from(const check::Machine& machine, const PlannedMachine& options);
/// Who says what a rank's memory is: "--device-memory", "memory of h100".
std::string memory_from(const check::Machine& machine, const PlannedMachine& options);

}  // namespace tessera::cli
