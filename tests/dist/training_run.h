// `tessera train` as a function: a small model on a page of text, on thread ranks, in a folder.
#pragma once

#include <filesystem>

#include "support/temporary_folder.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/trainer.h"

namespace tessera::test {

/// Writes a model of two layers and a page of text into `folder`. Returns a config that trains on
/// it: 4 rows a step, AdamW with clipping, fp32, no checkpoints until asked.
train::Config small_run(const TemporaryFolder& folder);

/// The same with that many steps, and with checkpoints.
train::Config with_steps(train::Config config, std::int64_t steps);

/// small_run with adapters of a model in bfloat16, which another run makes in `folder`/base.
train::Config adapters_run(const TemporaryFolder& folder);

struct RanksOfRun {
  int ranks = 1;
  int replicas = 1;
};

/// By step, from the first that was done.
struct RunLosses {
  std::vector<double> losses;
  std::vector<double> norms;
  train::TrainingResult result;
};

/// Runs `config` in the run folder `run` (config.job.dump_folder). `hooks` get the world too.
using HooksOf = std::function<train::TrainingHooks(World&)>;
RunLosses train_on(const RanksOfRun& layout, train::Config config, const std::filesystem::path& run,
                   const HooksOf& hooks = {});

}  // namespace tessera::test
