// Checkpoints of custom sharded modules, in the trainer's format (docs/checkpoint.md), written and
// read by the code that the trainer uses.
//
// Each rank writes its shards and their optimizer state, so nothing is gathered, and any number of
// ranks with any layout loads them, bit for bit. A checkpoint is complete once its folder has its
// final name: a crash at any moment leaves the earlier ones intact. A program with a file format of
// its own reads state_dict.h. Next: optim.h.
//
//   save_checkpoint(model, *optimizer, "run/checkpoint", step, {.user = {{"epoch", epoch}}});
//   ...
//   if (has_checkpoint(world, "run/checkpoint")) {
//     first = load_checkpoint(model, *optimizer, "run/checkpoint").step + 1;
//   }
#pragma once

#include <cstdint>
#include <string>

#include "tessera/checkpoint_values.h"
#include "tessera/grad_scaler.h"
#include "tessera/optim.h"
#include "tessera/shard.h"
#include "tessera/world.h"

namespace tessera {

/// Options of save_checkpoint().
struct SaveOptions {
  CheckpointValues user = {};          ///< values of the program, which a load returns
  const GradScaler* scaler = nullptr;  ///< its scale is saved too; null: none
  std::int64_t keep_latest_k = 0;      ///< number of checkpoints that stay; 0 = all
  /// The checkpoint's config.json. `tessera generate` and `tessera convert` read the checkpoint
  /// where this is the config of a model family whose parameter names the module has.
  std::string config_json = "{}";
};

/// Writes FOLDER/step-N, then FOLDER/latest, and waits until both are on disk. It saves parameters
/// (frozen ones too), buffers and the optimizer's state; it saves no hyperparameter of the
/// optimizer and no gradient. `step` is the number of finished steps, including those that a scaler
/// skipped. Ranks share `folder`, and one program at a time writes to it; an existing step-N is
/// replaced. Memory: one copy of this rank's shards and optimizer state during the write.
/// Collective, between steps. Errors, on all ranks alike: kUsage for an optimizer of another model,
/// for a step below the number of updates, and for a folder, step or options that differ between
/// ranks; kFormat for a config_json that is no JSON object; kIo naming the file, which leaves the
/// earlier checkpoints as they were.
void save_checkpoint(const ShardedBase& model, const Optimizer& optimizer,
                     const std::string& folder, std::int64_t step, const SaveOptions& options = {});

/// The values that a checkpoint holds in addition to tensors.
struct LoadedCheckpoint {
  std::string path;             ///< the folder step-N
  std::int64_t step = 0;        ///< number of finished steps; training continues with the next one
  std::int64_t world_size = 0;  ///< number of ranks that wrote it
  CheckpointValues user;        ///< SaveOptions::user
};

/// Returns whether `folder` holds a checkpoint for load_checkpoint(), as rank 0 sees it.
/// Collective. Errors, on all ranks alike: kIo; kFormat for a `latest` that names no checkpoint or
/// an incomplete one.
bool has_checkpoint(World& world, const std::string& folder);

/// Fills shards, buffers and optimizer state from FOLDER/latest, or from `folder` where that is a
/// step-N itself. Each rank reads the elements that it owns, and one rank verifies each file. A
/// checkpoint of the trainer loads too where its tensors have the names of the module. Parameters
/// need no storage before the call. A parameter that has no state in the checkpoint (it was frozen,
/// or never updated) starts without state, and rank 0 warns of it. `scaler` takes the loss scale
/// that the checkpoint holds. Memory: the optimizer's state exists once, since the old state of
/// each parameter is freed before the new one is allocated. Collective, between steps. Errors, on
/// all ranks alike: kUsage for an optimizer of another model, and while a forward waits for its
/// backward; kIo where there is no checkpoint; kFormat naming the file or tensor that is missing,
/// unknown, altered, or of another shape or dtype; kConfig for the state of another kind of
/// optimizer, for a scale below the scaler's min_scale, and for a checkpoint of adapters alone. An
/// error about names, shapes, dtypes, kinds or the scale leaves everything unchanged; after an
/// error about the bytes of a file the model holds no usable values.
LoadedCheckpoint load_checkpoint(ShardedBase& model, Optimizer& optimizer,
                                 const std::string& folder, GradScaler* scaler = nullptr);

}  // namespace tessera
