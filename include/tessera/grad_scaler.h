// GradScaler: trains in float16 without losing the gradients that float16 does not hold.
//
// The loss is multiplied by a scale before backward, and the one division that makes final
// gradients (docs/numerics.md) divides by the scale as well. So .grad() is never scaled, and norms,
// clipping and optimizers need no change. The scale is a power of two, so the division rounds as it
// would without it. Every rank skips a step whose gradients are not finite: all see the same norm,
// without another exchange. Source: torch.amp.GradScaler; its unscale_() has no counterpart. Next:
// loss_scale.h for how the scale moves, clip.h.
//
//   GradScaler scaler(model);
//   backward(scaler.scaled(loss));
//   const double norm = clip_grad_norm(model, 1.0);
//   scaler.step(*optimizer, model, norm);
//   model.zero_grad();
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "tessera/loss_scale.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera {

/// Scales the losses of one model.
class GradScaler {
 public:
  /// Makes the scaler of a model, after the outermost fully_shard. While it lives, every backward
  /// is expected to start from a scaled loss. Errors: kConfig for options; kUsage for a model that
  /// has a scaler already, and in the middle of a step.
  explicit GradScaler(const ShardedBase& model, const GradScalerOptions& options = {});
  ~GradScaler();  ///< ends the scaling of losses
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// Returns the scale, which is the same on every rank; only update() and restore() change it.
  double scale() const { return scale_.value(); }
  /// Returns loss * scale(), in float32 at least.
  at::Tensor scaled(const at::Tensor& loss) const;

  /// Moves the scale, and returns whether the optimizer may step: `norm`, the result of
  /// clip_grad_norm() or gradient_norm() over all gradients, is finite. Call it once a step, on
  /// every rank, after the last micro-batch. Collective only where it throws. Errors: kNumeric
  /// naming the first parameters, where the scale is at its minimum; kUsage while micro-batches
  /// wait to be reduced.
  bool update(const ShardedBase& model, double norm);
  /// Calls update(), and then the optimizer's step if it may be made. Returns whether it was made.
  bool step(Optimizer& optimizer, const ShardedBase& model, double norm);

  /// Returns the state for a checkpoint.
  const LossScaleState& state() const { return scale_.state(); }
  /// Continues from the state of another run. Errors: as require_restorable().
  void restore(const LossScaleState& state);
  /// Checks a state. Errors: kConfig for a state that this scaler cannot continue from, such as a
  /// scale below min_scale; kUsage in the middle of a step.
  void require_restorable(const LossScaleState& state) const;

 private:
  LossScale scale_;
  std::shared_ptr<fsdp::Unit> unit_;
};

}  // namespace tessera
