// RUN: the folder of a run, the same on every rank, and nobody else's while it runs.
//
// A run that is refused leaves nothing that it has made: whatever it makes before its first step is
// noted. Next: train.cpp.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "io/folder.h"
#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::cli {

/// What was not there before this run. Threads: any.
class MadeFolders {
 public:
  /// FOLDER and those above it. Errors: kIo naming the key.
  void make(const std::filesystem::path& folder, std::string_view key = "job.dump_folder");
  /// Something that the run has made for itself.
  void add(const std::filesystem::path& path);
  /// It is another run's after all.
  void leave(const std::filesystem::path& path);
  /// The run's own with all that it has written there, then those above that hold nothing else.
  void remove() const;

  /// For the other ranks, whose logs go there: each leaves when it does, and the last one removes
  /// what is there by then.
  std::string own() const;
  void take(const std::string& own);

 private:
  mutable base::Mutex mutex_;
  std::vector<std::filesystem::path> own_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::filesystem::path> above_ TESSERA_GUARDED_BY(mutex_);
};

struct RunFolder {
  train::Config config;  ///< its folders absolute (train::resolved_for_run)
  /// Rank 0: on all that the run writes into; for as long as it runs.
  std::vector<FolderLock> locks;
  MadeFolders made;
};

/// Rank 0 chooses job.dump_folder where the config names none and makes it: outputs/<time>-<name>,
/// never one that exists but where torchrun restarts a job, which goes on in its folder. `folder` is
/// filled as things are made. Collective over the World. Errors: kIo when it cannot be made; kConfig
/// where another run uses it.
void prepare_run_folder(const train::Config& config, const std::string& name, World& world,
                        RunFolder& folder);

/// RUN/config.toml, once the command is not refused any more. Errors: kIo.
void write_run_config(const train::Config& run);

}  // namespace tessera::cli
