// The training loop: what `tessera train` runs on every rank.
//
// Order of a step: the rows, their unmasked targets (one all-reduce), micro-batches forward and
// backward, the norm and the clip, the update, the report. Next: parallelize.h for how the model
// came to be.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "tessera/world.h"
#include "train/config/config.h"
#include "train/report/metrics.h"
#include "train/report/profile.h"

namespace tessera {
class ShardedBase;
}

namespace tessera::train {

/// The result of a run, the same on every rank.
struct TrainingResult {
  std::int64_t steps = 0;  ///< the last one that was done, before a resumption included
  double last_loss = 0;
  std::optional<double> last_val_loss;
};

/// Whether the command gave the number of ranks.
enum class RankCount : std::uint8_t { kGiven, kByDefault };

/// Hooks of observers, called on every rank alike; a hook may communicate if it does so on every
/// rank.
struct TrainingHooks {
  /// Everything was checked and the first step begins: errors before it are the user's input, after
  /// it failures of the run. `done` steps lie behind: training.steps where nothing is left to do.
  std::function<void(std::int64_t done)> on_first_step = {};
  /// The step was reported; the model holds the updated parameters. Its checkpoint, if one is due,
  /// comes next.
  std::function<void(const StepMetrics&, const ShardedBase&)> after_step = {};
  /// An error ends the run, which still stands: its checkpoint writer may be busy, and is waited
  /// for afterwards. A rank among others leaves the process from here, so that they need not wait.
  std::function<void(const std::exception&)> on_failure = {};
  /// Rank 0 prints where a step went at the end, on stderr, and writes RUN/profile.json.
  Profiling profiling = Profiling::kNo;
  /// kByDefault: where several devices are visible, the banner says how to use all.
  RankCount rank_count = RankCount::kGiven;
  /// Whether this rank was asked to stop: one that says yes ends the run on all of them, after the
  /// step and with a checkpoint. Asked once a step and after each batch of a validation, which ends
  /// there without a loss.
  std::function<bool()> stop_requested = {};
};

/// Trains as `config` (resolved_for_run) says, from the checkpoint that it names on. Collective.
/// Rank 0 writes metrics and prints step lines; when it returns all checkpoints are complete.
/// Errors: kConfig, kFormat, kIo, kContract before the first step; later kComm, kIo, and
/// kNumeric for a loss or a norm that is not finite, on all ranks alike; so is kIo for a
/// checkpoint.
TrainingResult run_training(const Config& config, World& world, const TrainingHooks& hooks = {});

}  // namespace tessera::train
