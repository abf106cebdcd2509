// RUN: the folder of a run, the same on every rank, and nobody else's while it runs.
//
// A run that is refused leaves nothing that it has made: whatever it makes before its first step is
// noted, and none of it is ever removed with what others put there (io/made_paths.h). Next:
// train.cpp.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/folder.h"
#include "io/made_paths.h"
#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::cli {

struct RunFolder {
  train::Config config;  ///< its folders absolute (train::resolved_for_run)
  /// Rank 0: on all that the run writes into; for as long as it runs.
  std::vector<FolderLock> locks;
  /// With the files that this rank puts there before the first step.
  MadePaths made;
};

/// Rank 0 chooses job.dump_folder where the config names none and makes it: outputs/<time>-<name>,
/// never one that exists but where torchrun restarts a job, which goes on in its folder. `folder` is
/// filled as things are made. Collective over the World. Errors: kIo when it cannot be made; kConfig
/// where another run uses it.
void prepare_run_folder(const train::Config& config, const std::string& name, World& world,
                        RunFolder& folder);

/// RUN/logs/rank_N.log.
std::filesystem::path log_file(const train::Config& run, int rank);

/// RUN/config.toml, once the command is not refused any more. Errors: kIo.
void write_run_config(const train::Config& run);

}  // namespace tessera::cli
