// Resuming a run: finding its checkpoint, refusing one of another run, reading it
// (checkpoint/loader.h), and the note for restarts: torchrun starts the same command again, and
// checkpoint.load_step is meant for the first attempt that comes so far.
//
// Every mistake is found before the first step and on every rank alike. Any layout reads any
// other. Next: checkpoint/saver.h writes them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "io/checkpoint_folder.h"
#include "models/model_spec.h"
#include "tessera/optim.h"
#include "tessera/shard.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/hf/model_forms.h"

namespace tessera::train {

class RestartNote {
 public:
  /// The note of this process's job, by torchrun's variables.
  explicit RestartNote(const std::filesystem::path& folder);

  /// The first attempt: what lies there is another job's. Errors: kIo.
  void forget_other_jobs() const;
  /// Whether an earlier attempt of this job began with `load_step` and came as far as write().
  bool has(std::int64_t load_step) const;
  /// `latest` is where attempts after this one resume. Errors: kIo.
  void write(std::int64_t load_step) const;

 private:
  std::string text(std::int64_t load_step) const;

  std::filesystem::path path_;
  std::string job_;
  bool under_torchrun_ = false;
  bool first_attempt_ = true;
};

/// The parts that a run and its checkpoint must have in common.
struct RunIdentity {
  models::ModelSpec spec;
  CheckpointData data;                            ///< on rank 0
  DataConfig data_section;                        ///< on rank 0, without patterns
  std::optional<DataConfig> data_section_before;  ///< of the run before, where it is known
  std::int64_t seed = 0;
  std::optional<CheckpointLora> lora;
};

/// RUN/config.toml, as the run before this one left it: none where there is no such file, or one
/// that this program does not read. Called before the run writes its own.
std::optional<Config> config_before(const Config& config);

/// Readies checkpoint.folder for writing (what a crash left unfinished is removed) and opens the
/// checkpoint that the run resumes from: none = a new run. Collective. Errors, on all ranks alike:
/// kConfig where load_step is 0 and there are checkpoints, or names none; kIo, kFormat naming the
/// file.
std::optional<CheckpointFolder> open_resumed(const CheckpointConfig& config, World& world);

/// Collective. Errors, on all ranks alike: kConfig for another model, seed, data or adapters, with
/// what was found and expected.
void require_same_run(const RunIdentity& identity, const CheckpointFolder& checkpoint,
                      World& world);

/// Refuses checkpoints for a run that does not use them: it would write its metrics and config over
/// those of the run that made them. Collective. Errors, on all ranks alike: kConfig where there are
/// some; kIo.
void require_no_checkpoints(const CheckpointConfig& config, World& world);

/// checkpointing::load() of tensors under the names of `forms`, with the keys of a config in its
/// errors; then `latest` stands for it. Collective. Errors: the same.
void load_checkpoint(const CheckpointFolder& checkpoint, const ShardedBase& model,
                     Optimizer& optimizer, World& world, const FileForms& forms = {});

}  // namespace tessera::train
