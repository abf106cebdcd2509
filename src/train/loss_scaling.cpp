#include "train/loss_scaling.h"

#include <algorithm>

#include "base/log.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

bool needs_scale(const GradContract& contract) {
  if (contract.compute.dtype == DType::kFloat16) return true;
  return contract.trainable &&
         (contract.reduce == DType::kFloat16 || contract.grad == DType::kFloat16);
}

}  // namespace

std::unique_ptr<GradScaler> make_scaler(const ShardedBase& model,
                                        const GradScalerOptions& options) {
  const auto contract = model.contract();
  if (std::ranges::any_of(contract.parameters, needs_scale)) {
    return std::make_unique<GradScaler>(model, options);
  }
  TESSERA_CHECK(options == GradScalerOptions{}, ErrorKind::kConfig,
                "grad_scaler: found values for a run without float16, expected none: the loss is "
                "scaled where a parameter computes or reduces in float16; leave them out, or set "
                "precision.param_dtype");
  return nullptr;
}

void restore_scaler(const CheckpointManifest& manifest, GradScaler* scaler) {
  const auto& state = manifest.loss_scale;
  if (scaler != nullptr && state) {
    scaler->restore(*state);
  } else if (scaler != nullptr) {
    log::warn("grad_scaler: found no loss scale in the checkpoint of step ", manifest.step,
              ", which a run without float16 wrote: it begins at ", scaler->scale(),
              ", and the first steps may be left out until it fits; set grad_scaler.init_scale, or "
              "precision.param_dtype and reduce_dtype as they were");
  } else if (state) {
    log::warn(
        "precision.param_dtype: found no float16 in a run that goes on from a checkpoint of "
        "one at the loss scale ",
        state->scale,
        ": the loss is no longer scaled, and the checkpoints to come keep no "
        "scale; set precision.param_dtype or reduce_dtype to float16 to go on as before");
  }
}

}  // namespace tessera::train
