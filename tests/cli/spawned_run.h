// The golden run on two ranks that the program starts itself: what every other way to start them is
// compared with.
#pragma once

#include <chrono>
#include <stdexcept>

#include "cli/golden_run.h"
#include "support/process.h"

namespace tessera::cli {

struct GoldenRun {
  std::vector<std::pair<double, double>> losses_and_norms;
  double peak_rss_mib = 0;
};

inline GoldenRun read_golden_run(const TemporaryFolder& folder) {
  const auto lines = lines_with(read_file(metrics_of(folder)), "peak_rss_mib");
  return {losses_and_norms(folder),
          nlohmann::json::parse(lines.back()).at("peak_rss_mib").get<double>()};
}

/// Run once for all that are compared with it.
inline const GoldenRun& spawned_run() {
  static const GoldenRun run = [] {
    const TemporaryFolder folder;
    write_golden_run(folder);
    Process process(folder.path(), started_by(Starter::kOwnSpawn, 2, {"train", "run.toml"}));
    if (process.wait(std::chrono::minutes(2)) != 0) {
      throw std::runtime_error("own spawn: " + process.err());
    }
    return read_golden_run(folder);
  }();
  return run;
}

}  // namespace tessera::cli
