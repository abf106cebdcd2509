// Reads a checkpoint into shards and optimizer state, on any layout: each rank reads the ranges
// that it owns, from the pieces that hold them. The loader does not choose the checkpoint, nor
// check that it fits the run: train/resume/resume.h and tessera/checkpoint.h do. Next: saver.h
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

/// The advice in errors of a load: by the keys of a configuration, or by names of the library.
struct LoadAdvice {
  const char* optimizer;      ///< what chooses the optimizer: "optimizer.name"
  const char* keeps_storage;  ///< for a trained parameter or buffer in another dtype
  const char* keeps_frozen;   ///< for a frozen parameter in another dtype
  const char* keeps_master;   ///< for an optimizer's tensor in another dtype
  const char* keeps_shape;
  const char* keeps_optimizer;
  const char* weights_alone;  ///< where there is no state of an optimizer
};

struct LoadRequest {
  const LoadAdvice& advice;
  FileForms forms = {};  ///< the names that the checkpoint has
  Holds holds = {};
  /// Is told the bytes that were read since the last call, and all bytes of this rank's share.
  std::function<void(std::int64_t bytes, std::int64_t total)> on_read = {};
};

/// Calls `open` on every rank, and checks that all see the same checkpoint. Collective. Errors, the
/// same on all ranks: as `open`; kIo where they see different ones.
CheckpointFolder open_on_all_ranks(World& world, const std::function<CheckpointFolder()>& open);

/// Fills shards and optimizer state, and verifies every file, each on one rank. Parameters without
/// state start from zero. Collective. Errors, the same on all ranks: kFormat naming the file or
/// tensor; kConfig for the states of another optimizer. Errors that follow from the manifest
/// (names, shapes, dtypes, kinds) change nothing. After an error in the files the model holds no
/// usable values.
void load(const CheckpointFolder& checkpoint, const ShardedBase& model, Optimizer& optimizer,
          World& world, const LoadRequest& request);

}  // namespace tessera::checkpointing
