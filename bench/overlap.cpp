// Trains a configuration whose exchanges of experts take longer: for bench/overlap, which says how.
//
//   build/release/bench/overlap RANKS DELAY_MS WARM_UP CONFIG.toml
//
// An exchange of experts arrives DELAY_MS after its issue at the earliest; no thread is held
// meanwhile (test_hooks::exchange_delay). Rank 0 prints a line of JSON: step times in ms behind the
// first WARM_UP steps, the losses, peak RSS in MiB.
#include <tessera/world.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/test_hooks.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/trainer.h"

namespace {

void measure(tessera::World& world, const tessera::train::Config& config, int warm_up) {
  nlohmann::json found{{"step_ms", nlohmann::json::array()}, {"loss", nlohmann::json::array()}};
  tessera::train::TrainingHooks hooks;
  hooks.after_step = [&](const tessera::train::StepMetrics& metrics, const tessera::ShardedBase&) {
    found["loss"].push_back(metrics.loss);
    if (metrics.step > warm_up) found["step_ms"].push_back(metrics.step_ms);
    found["peak_rss_mib"] = metrics.peak_rss_mib;
  };
  tessera::train::run_training(config, world, hooks);
  if (world.rank() == 0) std::puts(found.dump().c_str());
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fputs("overlap: expected RANKS DELAY_MS WARM_UP CONFIG.toml\n", stderr);
    return 2;
  }
  const int ranks = std::atoi(arguments[1]);
  const std::chrono::microseconds delay(std::lround(1000.0 * std::atof(arguments[2])));
  const int warm_up = std::atoi(arguments[3]);
  return tessera::launch(ranks, [&](tessera::World& world) {
    const auto read = tessera::train::load_config(arguments[4]);
    const auto config = tessera::train::resolved_for_run(read, read.job.dump_folder.value());
    tessera::train::validate(config, tessera::train::Verb::kTrain);
    const tessera::test_hooks::Set arrives(
        tessera::test_hooks::exchange_delay, [delay](const std::string& where) {
          return where.find("experts") == std::string::npos ? std::chrono::microseconds(0) : delay;
        });
    measure(world, config, warm_up);
  });
}
