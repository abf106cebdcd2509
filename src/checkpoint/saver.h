// CheckpointSaver: writes checkpoints while training continues.
//
// save() copies this rank's shards and optimizer state (snapshot.h) and hands them to a writer; the
// steps continue. Each rank writes its own file; when all have, rank 0 writes the manifest, gives
// the folder its final name, then writes `latest`, then removes old ones. The ranks notice that all
// have written where they meet anyway, at the end of a step: the writer itself never communicates,
// so the order of collectives depends on the thread of each rank only. Next: loader.h reads them,
// docs/checkpoint.md is the format.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <optional>
#include <string>

#include "checkpoint/snapshot.h"
#include "io/checkpoint_store.h"
#include "tessera/grad_scaler.h"
#include "tessera/world.h"

namespace tessera::checkpointing {

struct CheckpointOptions {
  std::string folder;
  std::int64_t keep_latest_k = 0;  ///< 0 = all
  /// The manifest without files and tensors.
  CheckpointManifest about;
  std::string config_json;
  StateOptions state;
};

class CheckpointSaver {
 public:
  CheckpointSaver(World& world, CheckpointOptions options);
  ~CheckpointSaver();  ///< waits for this rank's writer; an incomplete checkpoint stays unfinished
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Checks that the checkpoints to be saved have a manifest that readers take. Collective. Errors,
  /// the same on all ranks: kConfig.
  void check_plan(const ShardedBase& model, const Optimizer& optimizer);

  /// Finishes the checkpoint in progress, if any, then copies the state after `step`. `left_out`:
  /// as CheckpointManifest::left_out_steps. Collective. Errors: kIo for the earlier checkpoint, the
  /// same on all ranks.
  void save(std::int64_t step, const ShardedBase& model, const Optimizer& optimizer,
            const GradScaler* scaler = nullptr,
            std::optional<std::int64_t> left_out = std::nullopt);

  /// Whether this rank's writer has work left; tell it to all ranks at the end of each step.
  bool writing() const;
  /// `anyone_writes` is the answer of all ranks: once none writes, continues the checkpoint in
  /// progress. Collective. Errors: kIo naming the file, the same on all ranks, after the unfinished
  /// folder is removed.
  void advance(bool anyone_writes);
  /// Waits until the checkpoint in progress is complete. Collective. Errors: as advance().
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  enum class Phase { kIdle, kFiles, kManifest };

  /// Called before the first look at what this rank writes. Collective.
  void ask_stages(const ShardedBase& model);
  void start(std::function<std::string()> work);
  void meet();
  std::string write_files() const;
  /// `parts`: the text of each rank, the hash of its part after a '+'. Returns the bytes of the
  /// whole checkpoint.
  std::int64_t complete(const std::vector<std::string>& parts) const;
  void require_files(const CheckpointManifest& manifest) const;

  World& world_;
  CheckpointOptions options_;
  const CheckpointStore store_;
  Snapshot snapshot_;
  Phase phase_ = Phase::kIdle;
  bool asked_stages_ = false;
  std::int64_t step_ = 0;
  std::string optimizer_;
  std::optional<LossScaleState> loss_scale_;
  std::optional<std::int64_t> left_out_;
  Clock::time_point begun_;
  double held_up_ms_ = 0;  ///< how long the steps were stopped for it
  /// The text that a rank reports when its work is done: the hash of its part of the manifest. Last
  /// member: its destructor waits for work that uses the others.
  std::future<std::string> work_;
};

}  // namespace tessera::checkpointing
