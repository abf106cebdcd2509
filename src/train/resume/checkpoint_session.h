// The trainer's side of checkpoints: what the run resumes from, and when one is saved.
// Without [checkpoint] enable a folder that holds some is refused, and every call does nothing.
// Next: resume.h, checkpoint/saver.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/saver.h"
#include "train/data/data.h"
#include "train/hf/model_source.h"
#include "train/resume/resume.h"

namespace tessera::train {

/// The progress of a run.
struct StepsDone {
  std::int64_t step = 0;      ///< the last one; 0: none
  std::int64_t left_out = 0;  ///< of these, how many made no update
};

class CheckpointSession {
 public:
  /// Opens the checkpoint that the run resumes from. Collective. Errors: as open_resumed() or
  /// require_no_checkpoints().
  CheckpointSession(const Config& config, const Mesh& mesh);

  bool resumes() const { return resumed_.has_value(); }
  /// training.global_batch_size of this run. Errors: as resumed_global_batch_size().
  std::int64_t global_batch_size(int data_ranks) const;
  /// Once the data is open: that it is the same run, and all that saving needs. Collective. Errors:
  /// as require_same_run().
  void begin(const ModelSource& source, const BatchSource& data);
  /// The fused weights that Muon steps as one matrix: those of the checkpoint in a resumed run
  /// (begin() logs where the rules differ), else those of the rules.
  std::vector<std::string> fused_as_one(const ModelSource& source) const;
  /// Fills model, optimizer and scaler, if any, in a resumed run; returns its progress. Collective.
  /// Errors: as load_checkpoint(), restore_scaler(), and kConfig where what is going to be saved
  /// would have a manifest that no reader takes.
  StepsDone load(const ShardedBase& model, Optimizer& optimizer, GradScaler* scaler);

  /// This rank's writer has work left.
  bool writing() const { return saver_ && saver_->writing(); }
  /// `anyone_writes` is writing() of all ranks, `last` the end of the run. Collective. Errors: kIo
  /// where writing failed, on all ranks alike.
  void after_step(const StepsDone& done, bool last, bool anyone_writes, const ShardedBase& model,
                  const Optimizer& optimizer, const GradScaler* scaler);
  /// Waits for what is being written. Collective. Errors: the same.
  void finish();

 private:
  const Config config_;
  const Mesh mesh_;
  World& world_;
  FileForms forms_;
  std::optional<CheckpointFolder> resumed_;
  std::optional<checkpointing::CheckpointSaver> saver_;
};

/// Resumes at the scale of the checkpoint. A run that has changed to or from float16 begins with a
/// new scale, or without; rank 0 warns of it. Errors: kConfig for a scale below
/// grad_scaler.min_scale.
void restore_scaler(const CheckpointManifest& manifest, GradScaler* scaler);

}  // namespace tessera::train
