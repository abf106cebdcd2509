// GradScaler: trains in float16 without losing the gradients that float16 does not hold.
//
// The loss is multiplied by a scale before backward; the one division that makes final gradients
// (docs/numerics.md) divides by it as well. So what stands in .grad() is never scaled: norms, clips
// and optimizers need not know, and since the scale is a power of two the division rounds as it
// would without it. A step whose gradients are not finite is left out on every rank, because every
// rank looks at the same norm: no exchange of its own. Source: torch.amp.GradScaler; its unscale_()
// has no counterpart. Next: loss_scale.h for how the scale moves, clip.h.
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

class GradScaler {
 public:
  /// One per model, made after the outermost fully_shard; from here on every backward is taken to
  /// start from a scaled loss. Errors: kConfig for options; kUsage for a model with another scaler,
  /// or in the middle of a step.
  explicit GradScaler(const ShardedBase& model, const GradScalerOptions& options = {});
  ~GradScaler();  ///< losses are plain again
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The same on every rank; changes in update() and restore() only.
  double scale() const { return scale_.value(); }
  /// loss * scale(), in float32 at least.
  at::Tensor scaled(const at::Tensor& loss) const;

  /// Whether the step may be made: `norm`, of all gradients as clip_grad_norm() or gradient_norm()
  /// return it, is finite. Moves the scale. Call it once a step, on every rank, after the last
  /// micro-batch. Collective where the error is thrown, else not. Errors: kNumeric naming the first
  /// parameters where the scale cannot fall any more; kUsage while micro-batches wait to be
  /// reduced.
  bool update(const ShardedBase& model, double norm);
  /// update(), and the optimizer's step where it may be made. Returns whether it was.
  bool step(Optimizer& optimizer, const ShardedBase& model, double norm);

  const LossScaleState& state() const { return scale_.state(); }
  /// Goes on where another run was. Errors: as require_restorable().
  void restore(const LossScaleState& state);
  /// Errors: kConfig for a state that it cannot go on from, as one below min_scale; kUsage in the
  /// middle of a step.
  void require_restorable(const LossScaleState& state) const;

 private:
  LossScale scale_;
  std::shared_ptr<fsdp::Unit> unit_;
};

}  // namespace tessera
