#include "cli/planned_machine.h"

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <sstream>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "io/hf_folder.h"
#include "tessera/error.h"
#include "train/data/config_paths.h"

namespace tessera::cli {
namespace {

check::Machine described(const std::string& asked) {
  if (auto machine = check::shipped_machine(asked)) return *machine;
  std::error_code unknown;
  if (!std::filesystem::exists(asked, unknown)) {
    const auto names = check::shipped_machines();
    const auto close = close_name(asked, names);
    throw Error(ErrorKind::kUsage,
                concat("--machine: found no file ", shown(asked), ", expected one, or ",
                       joined(names), close ? concat("; the nearest is ", *close) : ""));
  }
  return train::open_as("--machine", [&] {
    return check::parse_machine(read_text_file(asked, check::kMostMachineBytes), asked);
  });
}

/// "3.20 ms", "2.99 s".
std::string time_text(double ms) {
  constexpr double kMostDigits = 1e6;
  const bool is_short = ms < 999.995;
  const double value = is_short ? ms : ms / 1e3;
  std::ostringstream text;
  if (value < kMostDigits) text << std::fixed;
  text << std::setprecision(2) << value << (is_short ? " ms" : " s");
  return text.str();
}

}  // namespace

check::Machine machine_of(const PlannedMachine& options) {
  check::Machine machine;
  if (options.machine) machine = described(*options.machine);
  if (options.device_memory) {
    machine.memory = parse_byte_size(*options.device_memory, "--device-memory");
  }
  if (options.ranks_per_host) machine.ranks_per_host = options.ranks_per_host;
  if (options.flops) machine.flops = check::ProductFlops{*options.flops, *options.flops};
  if (options.bandwidth) {
    machine.bandwidth = static_cast<double>(parse_byte_size(*options.bandwidth, "--bandwidth"));
    machine.host_bandwidth = machine.bandwidth;
  }
  return machine;
}

void take_device(const PlannedMachine& options, train::Config& config) {
  const bool is_gpu = options.machine && check::shipped_machine(*options.machine);
  if (is_gpu && config.device == train::DeviceName::kAuto) config.device = train::DeviceName::kCuda;
}

bool gives_time(const check::Machine& machine, const PlannedMachine& options,
                const train::Config& config, int ranks) {
  if (!machine.flops) return false;
  TESSERA_CHECK(
      config.training.seq_len || !options.flops, ErrorKind::kUsage,
      "--flops: found no training.seq_len, expected it: nothing else says how much a step "
      "computes; set it");
  if (!config.training.seq_len) return false;
  const int per_host = machine.ranks_per_host.value_or(ranks);
  TESSERA_CHECK(machine.bandwidth || std::min(ranks, per_host) == 1, ErrorKind::kConfig,
                "--machine: found no bandwidth of ", machine.name, ", expected one for ", ranks,
                " ranks; measure it with at least two ranks, or give --bandwidth");
  TESSERA_CHECK(machine.host_bandwidth || ranks <= per_host, ErrorKind::kConfig,
                "--machine: found no host_bandwidth of ", machine.name, ", expected one for ",
                ranks, " ranks, of which ", per_host,
                " share a host; write it into the file, or give --bandwidth");
  return true;
}

std::string rates_from(const check::Machine& machine, const PlannedMachine& options) {
  if (!options.machine) return "--flops and --bandwidth";
  const std::string_view flops = options.flops ? "--flops" : "";
  const std::string_view bandwidth = options.bandwidth ? "--bandwidth" : "";
  if (flops.empty() && bandwidth.empty()) return machine.name;
  return concat(machine.name, " with ", flops, flops.empty() || bandwidth.empty() ? "" : " and ",
                bandwidth);
}

std::string memory_from(const check::Machine& machine, const PlannedMachine& options) {
  return options.device_memory ? "--device-memory" : concat("memory of ", machine.name);
}

std::string time_line(std::string_view by, const capture::SimulatedStep& step) {
  return concat("  a step by ", by, ": ", time_text(step.step_ms), ", of which computing ",
                time_text(step.compute_ms), " (of that ", time_text(step.again_ms),
                " recomputing),\n    waiting for gathers ", time_text(step.waited_ms),
                ", for reductions ", time_text(step.reduced_ms), ", the update and all else ",
                time_text(step.rest_ms), "\n");
}

capture::SimulatedStep step_at(const check::Machine& machine, const train::RunOfPlan& run,
                               const fsdp::StepPlan& plan, const train::StepTraffic& traffic) {
  return capture::simulate(plan, train::profile_at(machine, run, traffic), traffic.micro_batches);
}

}  // namespace tessera::cli
