// Who looks on while a run trains and changes nothing of it: TensorBoard's event files, traces of
// chosen steps, the profile, the progress line.
//
// The trainer calls each function at its place and knows nothing of what is behind them. Next:
// io/tensorboard.h, step_trace.h, profile.h, progress.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "io/tensorboard.h"
#include "tessera/world.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/profile.h"
#include "train/progress.h"
#include "train/step_trace.h"

namespace tessera::train {

class Observers {
 public:
  /// `config` as run_training has it, `first_step` the first that this process runs. Errors: kIo
  /// for folders that cannot be made.
  Observers(const Config& config, World& world, std::int64_t first_step, Profiling profiling);

  /// Around each step, on the rank's own thread. Collective where the step is traced.
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
