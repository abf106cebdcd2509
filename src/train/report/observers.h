// Observers of a run, which change nothing of it: TensorBoard's event files, traces of
// chosen steps, the profile, the progress line.
//
// The trainer calls each function at its place and knows nothing of what is behind them. Next:
// io/tensorboard.h, base/trace.h for traces, profile.h, progress.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "io/tensorboard.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/report/metrics.h"
#include "train/report/profile.h"
#include "train/report/progress.h"

namespace tessera::train {

/// A traced step: takes its spans on the calling thread, and waits until the world's device has
/// done it.
struct TracedStep {
  std::shared_ptr<Trace> trace;
  std::function<void()> through;
};
TracedStep traced_step(const World& world);

/// Traces of chosen steps: RUN/metrics/trace/step-N.json, all ranks in one file on one clock.
class StepTrace {
 public:
  /// `steps` is the same on every rank.
  StepTrace(std::vector<std::int64_t> steps, std::filesystem::path folder, World& world);

  /// Enclose each step, on the rank's thread. Collective where the step is a chosen one.
  /// Errors: kComm; kIo on rank 0, which writes.
  void begin_step(std::int64_t step);
  void end_step(std::int64_t step);

 private:
  bool is_chosen(std::int64_t step) const;

  std::vector<std::int64_t> steps_;
  std::filesystem::path folder_;
  World& world_;
  std::shared_ptr<Trace> trace_;
  std::function<void()> through_;  ///< until the device is through with the step
  std::optional<TraceHere> here_;
  TraceClock::time_point origin_;  ///< what all ranks call zero
  TraceClock::time_point begin_;
};

class Observers {
 public:
  /// `config` as run_training has it, `first_step` the first that this process runs. Errors: kIo
  /// for folders that cannot be made.
  Observers(const Config& config, World& world, std::int64_t first_step, Profiling profiling);

  /// Enclose each step, on the rank's thread. Collective where the step is traced.
  void begin_step(std::int64_t step);
  void end_step(std::int64_t step);
  /// The step's metrics were agreed on, its line was printed. Errors: kIo.
  void report(const StepMetrics& metrics);
  /// After the last step.
  void finish();

 private:
  const Config& config_;
  std::optional<EventFile> events_;           ///< of rank 0
  std::unique_ptr<StepProfile> profile_;      ///< of rank 0
  std::optional<TrainingProgress> progress_;  ///< of rank 0
  StepTrace traces_;
  std::int64_t profile_from_;
};

}  // namespace tessera::train
