// Checkpoints of one's own sharded modules, in the trainer's format (docs/checkpoint.md), written
// and read by the code that the trainer uses.
//
// Each rank writes its shards and what the optimizer keeps of them, so nothing is gathered, and any
// number of ranks with any layout loads them, bit for bit. A checkpoint is complete when its folder
// has its final name, or it is not there: a crash at any moment leaves those before it. For a file
// format of one's own: state_dict.h. Next: optim.h.
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

struct SaveOptions {
  CheckpointValues user = {};
  const GradScaler* scaler = nullptr;  ///< its scale is saved with the rest
  std::int64_t keep_latest_k = 0;      ///< older ones are removed; 0 = all stay
  /// config.json of the checkpoint: with that of a family whose names the module has, `tessera
  /// generate` and `tessera convert` read it.
  std::string config_json = "{}";
};

/// Writes FOLDER/step-N, then FOLDER/latest, and waits until both are on disk. Saved are all
/// parameters, frozen ones too, buffers, and what the optimizer keeps; not its learning rate, betas
/// and the like, and no gradient. `step` is the number of steps that are done, those that a scaler
/// left out included. Ranks share `folder`, which one program at a time writes to; step-N is
/// replaced where it is there. Memory: one copy of this rank's shards and optimizer state while it
/// is written. Collective, between steps. Errors, on all ranks alike: kUsage for an optimizer of
/// another model, a step below the updates that were made, a folder, step or options that are not the
/// same on every rank; kFormat for a config_json that is no JSON object; kIo naming the file, after
/// which the earlier checkpoints are as they were.
void save_checkpoint(const ShardedBase& model, const Optimizer& optimizer,
                     const std::string& folder, std::int64_t step, const SaveOptions& options = {});

/// What was saved beside tensors.
struct LoadedCheckpoint {
  std::string path;             ///< of step-N
  std::int64_t step = 0;        ///< the next one is the first to do
  std::int64_t world_size = 0;  ///< ranks that wrote it
  CheckpointValues user;
};

/// Whether `folder` holds one for load_checkpoint(): what rank 0 sees. Collective. Errors, on all
/// ranks alike: kIo; kFormat for a `latest` that names none, or one that is not whole.
bool has_checkpoint(World& world, const std::string& folder);

/// Fills shards, buffers and optimizer state from FOLDER/latest, or from `folder` where that is a
/// step-N itself; each rank reads the elements that it owns, and every file is verified by one
/// rank. It may be a checkpoint of the trainer's where its tensors have the names of the module.
/// Parameters may be without storage before. A parameter without state (frozen until now, or never
/// updated) begins anew, and rank 0 warns of it. Where the checkpoint has a loss scale `scaler`
/// goes on at it. Collective, between steps. Errors, on all ranks alike: kUsage for an optimizer of
/// another model, while a forward waits for its backward; kIo where there is none, kFormat naming
/// the file or tensor that is missing, unknown, altered, or has another shape or dtype; kConfig for
/// the state of another kind of optimizer, a scale below the scaler's min_scale, and for adapters
/// alone. Nothing has changed after those that names, shapes, dtypes, kinds and the scale give;
/// after one in the files' bytes the model holds nothing of use. The optimizer's state is in memory
/// once: of each parameter what was kept goes before what comes is made.
LoadedCheckpoint load_checkpoint(ShardedBase& model, Optimizer& optimizer,
                                 const std::string& folder, GradScaler* scaler = nullptr);

}  // namespace tessera
