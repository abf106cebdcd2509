// The model that adapters are trained beside: adapters mean nothing next to another one.
#pragma once

#include "base/hash.h"
#include "tessera/world.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// XXH3-128 over every tensor's name, dtype, shape and bytes, by name: however the files are cut.
/// Reads them all.
Hash128 tensors_hash(const TensorSource& folder);
/// The same, each tensor read by one rank. Collective. Errors: kIo, on all ranks alike.
Hash128 tensors_hash(const TensorSource& folder, World& world);

/// That source.folder is the model that source.base_hash says. Errors: kConfig, on all ranks alike.
void check_base(const ModelSource& source);
void check_base(const ModelSource& source, World& world);  ///< collective

}  // namespace tessera::train
