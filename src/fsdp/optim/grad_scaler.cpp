#include "tessera/grad_scaler.h"

#include <ATen/ATen.h>

#include <cmath>

#include "base/interrupt.h"
#include "base/text/printable.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/clip.h"
#include "tessera/error.h"

namespace tessera {

GradScaler::GradScaler(const ShardedBase& model, const GradScalerOptions& options)
    : scale_(options), unit_(model.unit()) {
  auto& runtime = fsdp::unit_of_handle(unit_).runtime();
  TESSERA_CHECK(!runtime.has_scaler(), ErrorKind::kUsage,
                "GradScaler: found a model that has one, expected one per model; keep using it, or "
                "let it go first");
  runtime.set_loss_scale(scale(), "GradScaler");
  runtime.set_has_scaler(true);
}

GradScaler::~GradScaler() {
  const base::NoInterrupts until_it_is_gone;
  auto& runtime = unit_->runtime();
  runtime.set_has_scaler(false);
  try {
    runtime.set_loss_scale(1.0, "GradScaler");
  } catch (const std::exception&) {
    // It ends in the middle of a step, which an exception ends or the next backward refuses.
  }
}

at::Tensor GradScaler::scaled(const at::Tensor& loss) const {
  const auto dtype = loss.scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  return (narrow ? loss.to(at::kFloat) : loss).mul(scale());
}

bool GradScaler::update(const ShardedBase& model, double norm) {
  auto& runtime = unit_->runtime();
  TESSERA_CHECK(model.unit() == unit_ && runtime.loss_scale() == scale(), ErrorKind::kUsage,
                "GradScaler: found a model whose gradients are divided by ", runtime.loss_scale(),
                ", expected the one that it was made for, by ", scale(),
                "; make the scaler after the outermost fully_shard, with that handle");
  runtime.require_whole_sums("GradScaler");
  const bool finite = std::isfinite(norm);
  if (finite) {
    scale_.step_was_finite();
  } else {
    TESSERA_CHECK(scale_.can_shrink(), ErrorKind::kNumeric,
                  "GradScaler: found gradients that are not finite (norm ", norm,
                  ") at the loss scale ", scale(), " after ", state().skipped_steps,
                  " skipped steps, expected finite ones before grad_scaler.min_scale is reached; "
                  "first parameters concerned: ",
                  joined(nonfinite_parameters(model, 3), "none"),
                  "; lower the learning rate or grad_scaler.min_scale, or compute in bfloat16");
    scale_.step_was_skipped();
  }
  runtime.set_loss_scale(scale(), "GradScaler");
  return finite;
}

bool GradScaler::step(Optimizer& optimizer, const ShardedBase& model, double norm) {
  const bool finite = update(model, norm);
  if (finite) optimizer.step();
  return finite;
}

void GradScaler::require_restorable(const LossScaleState& state) const {
  LossScale next = scale_;
  next.restore(state);
  auto& runtime = unit_->runtime();
  if (next.value() != runtime.loss_scale()) runtime.require_whole_sums("GradScaler");
}

void GradScaler::restore(const LossScaleState& state) {
  LossScale next = scale_;
  next.restore(state);
  unit_->runtime().set_loss_scale(next.value(), "GradScaler");
  scale_ = next;
}

}  // namespace tessera
