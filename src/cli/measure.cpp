// Measures this machine with the kernels and the transport of a run, and writes its description for
// --machine.
#include <array>
#include <ctime>
#include <iostream>
#include <string>

#include "base/log.h"
#include "check/machine.h"
#include "cli/arguments.h"
#include "cli/help_text.h"
#include "cli/program_end.h"
#include "cli/ranks.h"
#include "comm/device.h"
#include "io/atomic_file.h"
#include "tessera/error.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/measure_machine.h"

namespace tessera::cli {
namespace {

std::string date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", &parts);
  return text.data();
}

train::Config config_of(const MeasureArguments& arguments) {
  for (const auto& [key, value] : arguments.overrides) {
    TESSERA_CHECK(takes_key("measure", key), ErrorKind::kUsage, "measure: found --", key,
                  ", expected no key but device and those of [comm]");
  }
  train::Config config;
  apply(arguments.overrides, config);
  return config;
}

}  // namespace

int run_measure(const MeasureArguments& arguments) {
  constexpr int kRanks = 2;
  const train::Config config = config_of(arguments);
  const auto nproc = launched() ? arguments.nproc : arguments.nproc.value_or(kRanks);
  const bool on_cpu = config.device == train::DeviceName::kCpu || comm::cuda_devices() == 0;
  if (!launched() && on_cpu) {  // before so many processes are started
    train::require_memory_to_measure(*nproc, *nproc, train::available_bytes());
  }
  return run_ranks(config, nproc, [&](World& world, RunPhase& phase) {
    log::init({.rank = world.rank(), .world_size = world.size(), .file = {}});
    train::require_memory_to_measure(world);
    if (arguments.out && world.rank() == 0) try_output("--out", *arguments.out);
    phase.begin_steps();
    auto [machine, notes] = train::measure_machine(world);
    if (world.rank() != 0) return;
    notes.insert(notes.begin(), concat("Measured by tessera measure on ", date(), "."));
    const std::string text = check::to_toml(machine, notes);
    if (arguments.out) {
      train::open_as("--out", [&] { write_atomically(*arguments.out, text); });
      return;
    }
    std::cout << text;
    check_standard_output();
  });
}

}  // namespace tessera::cli
