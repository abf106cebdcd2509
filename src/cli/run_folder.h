// RUN: the folder of one training run, the same on every rank.
#pragma once

#include <string>
#include <vector>

#include "io/folder_lock.h"
#include "tessera/world.h"
#include "train/config.h"

namespace tessera::cli {

/// "tiny" of "configs/tiny.toml".
std::string run_name(const std::string& config_file);

struct RunFolder {
  train::Config config;  ///< its folders absolute (train::resolved_for_run)
  std::vector<FolderLock>
      locks;  ///< rank 0: on all that the run writes into; for as long as it runs
};

/// Rank 0 chooses job.dump_folder where the config names none and makes it: outputs/<time>-<name>,
/// never one that exists but where torchrun restarts a job, which goes on in its folder.
/// Collective over the World. Errors: kIo when it cannot be made; kConfig where another run uses
/// it.
RunFolder prepare_run_folder(const train::Config& config, const std::string& name, World& world);

/// RUN/config.toml, once the command is not refused any more. Errors: kIo.
void write_run_config(const train::Config& run);

}  // namespace tessera::cli
