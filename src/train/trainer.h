// The training loop: what `tessera train` runs on every rank.
//
// Order of a step: the rows, their kept labels (one all-reduce), micro-batches forward and
// backward, the norm and the clip, the update, the report. Next: parallelize.h for how the model
// came to be.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/world.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/profile.h"

namespace tessera {
class ShardedBase;
}

namespace tessera::train {

/// What a run ends with, the same on every rank.
struct TrainingResult {
  std::int64_t steps = 0;
  double last_loss = 0;
  std::optional<double> last_val_loss;
};

/// Where a caller may look on, on every rank alike; a hook may communicate if it does so on every
/// rank.
struct TrainingHooks {
  /// Everything was checked and the first step begins: errors before it are the user's input, after
  /// it failures of the run.
  std::function<void()> on_first_step = {};
  /// The step was reported; the model holds the updated parameters.
  std::function<void(const StepMetrics&, const ShardedBase&)> after_step = {};
  /// Rank 0 prints where a step went at the end, on stderr, and writes RUN/profile.json.
  Profiling profiling = Profiling::kNo;
};

/// Trains as `config` (resolved_for_run) says. Collective. Rank 0 writes metrics and prints step
/// lines. Errors: kConfig, kFormat, kIo, kContract before the first step; later kComm, kIo, and
/// kNumeric for a loss or a norm that is not finite, on all ranks alike.
TrainingResult run_training(const Config& config, World& world, const TrainingHooks& hooks = {});

}  // namespace tessera::train
