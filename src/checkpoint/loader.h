// Reading a checkpoint into shards and optimizer state, on any layout: each rank reads the ranges
// that it owns, out of whatever pieces hold them. Nothing here knows which checkpoint is meant, nor
// of what run it has to be: train/resume/resume.h and tessera/checkpoint.h do. Next: saver.h
// writes them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/file_forms.h"
#include "checkpoint/snapshot.h"
#include "io/checkpoint_folder.h"
#include "tessera/optim.h"
#include "tessera/shard.h"
#include "tessera/world.h"

namespace tessera::checkpointing {

/// How whoever loads is advised: by the keys of a configuration, or by names of the library.
struct LoadAdvice {
  const char* optimizer;      ///< what says which optimizer it is: "optimizer.name"
  const char* keeps_storage;  ///< of a trained parameter or buffer in another dtype
  const char* keeps_frozen;   ///< of a frozen parameter in another dtype
  const char* keeps_master;   ///< of an optimizer's tensor in another dtype
  const char* keeps_shape;
  const char* keeps_optimizer;
  const char* weights_alone;  ///< where there is no state of an optimizer
};

struct LoadRequest {
  const LoadAdvice& advice;
  FileForms forms = {};  ///< the names that the checkpoint has
  Holds holds = {};
  /// Bytes that are read since the last call, and all of this rank's share.
  std::function<void(std::int64_t bytes, std::int64_t total)> on_read = {};
};

/// `open` on every rank, and that all see the same checkpoint. Collective. Errors, on all ranks
/// alike: as `open`; kIo where they see others.
CheckpointFolder open_on_all_ranks(World& world, const std::function<CheckpointFolder()>& open);

/// Fills shards and optimizer state, and verifies every file, each on one rank. Parameters without
/// state begin anew. Collective. Errors, on all ranks alike: kFormat naming the file or tensor;
/// kConfig for the states of another optimizer. Nothing is changed by those that follow from the
/// manifest: names, shapes, dtypes, kinds. After one in the files the model holds nothing of use.
void load(const CheckpointFolder& checkpoint, const ShardedBase& model, Optimizer& optimizer,
          World& world, const LoadRequest& request);

}  // namespace tessera::checkpointing
