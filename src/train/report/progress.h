// Output of a run in progress: the line of each step on stdout, and the progress line while weights
// are loaded and while steps run. The texts are pure; showing the progress line is base/log.h's,
// silent where stderr is no terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "train/report/metrics.h"

namespace tessera::train {

/// "0:07", "12:34", "3:25:45", "2 d 3:25:45".
std::string duration_text(std::chrono::seconds time);
/// "loading weights  45 %  180 of 400 MiB".
std::string loading_text(const std::string& what, std::int64_t done_bytes,
                         std::int64_t total_bytes);
/// "step 12 of 300   4 %  loss 3.4210  tps 12,345  3:25 left"; without a time where none is known.
std::string training_text(const StepMetrics& metrics, std::int64_t steps,
                          std::optional<std::chrono::seconds> left);

/// The progress of one rank: it is shown where asked for (`shown`), so that only one rank does it.
class LoadingProgress {
 public:
  enum class Shown : std::uint8_t { kNo, kYes };
  LoadingProgress(std::string what, std::int64_t total_bytes, Shown shown);
  ~LoadingProgress();
  LoadingProgress(const LoadingProgress&) = delete;
  LoadingProgress& operator=(const LoadingProgress&) = delete;

  /// Draws ten times a second at most.
  void add(std::int64_t bytes);

 private:
  std::string what_;
  std::int64_t total_bytes_;
  std::int64_t done_bytes_ = 0;
  bool shown_;
  std::chrono::steady_clock::time_point next_;
};

/// The time that is left follows from all steps of this process but the first, which fills caches.
class TrainingProgress {
 public:
  TrainingProgress(std::int64_t first_step, std::int64_t steps);
  ~TrainingProgress();
  TrainingProgress(const TrainingProgress&) = delete;
  TrainingProgress& operator=(const TrainingProgress&) = delete;

  void show(const StepMetrics& metrics);

 private:
  std::int64_t first_step_;
  std::int64_t steps_;
  std::chrono::steady_clock::time_point first_done_;
};

/// Prints the lines of steps on stdout. A line that cannot be written does not end the run, since
/// metrics.jsonl has every step; it is logged once.
class StepLines {
 public:
  void print(const std::string& line);

 private:
  bool warned_ = false;
};

}  // namespace tessera::train
