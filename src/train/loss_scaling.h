// Which runs scale their loss, and by whom.
#pragma once

#include <memory>

#include "io/checkpoint_manifest.h"
#include "tessera/grad_scaler.h"

namespace tessera::train {

/// A scaler where float16 is computed with, frozen parameters included (gradients pass through
/// them), or carries gradients; else none. Errors: kConfig for options of a run that needs none.
std::unique_ptr<GradScaler> make_scaler(const ShardedBase& model, const GradScalerOptions& options);

/// Goes on at the scale of the checkpoint. A run that has changed to or from float16 begins anew,
/// or without; rank 0 warns of it. Errors: kConfig for a scale below grad_scaler.min_scale.
void restore_scaler(const CheckpointManifest& manifest, GradScaler* scaler);

}  // namespace tessera::train
