// A run on two ranks that saves as it goes.
#pragma once

#include <chrono>
#include <string>

#include "support/process.h"

namespace tessera::cli {

inline constexpr auto kLong = std::chrono::minutes(2);

/// `limit` stands in front of the program.
inline Words two_ranks(const std::string& run, int steps, int interval, const Words& limit = {}) {
  Words words = limit;
  const Words program{TESSERA_PROGRAM,
                      "train",
                      "run.toml",
                      "--nproc",
                      "2",
                      "--job.dump_folder",
                      run,
                      "--training.steps",
                      std::to_string(steps),
                      "--checkpoint.interval",
                      std::to_string(interval),
                      "--metrics.log_freq",
                      "100000"};
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

}  // namespace tessera::cli
