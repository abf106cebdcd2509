// One call of a sharded module: what the hooks of FSDP2 do around a forward.
#include <ATen/ATen.h>

#include "fsdp/boundary.h"
#include "fsdp/dtype_observer.h"
#include "fsdp/recompute.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/shard.h"

namespace tessera {
namespace {

void cast_floating(const std::vector<at::Tensor*>& tensors, DType dtype) {
  const WideScope boundary;  // the contract asks for it
  for (auto* tensor : tensors) {
    if (tensor->defined() && tensor->is_floating_point())
      *tensor = tensor->to(to_scalar_type(dtype));
  }
}

/// checkpoint() has switched grad mode off for the first run. Where the function switches it on
/// over a call, that call looks like one of a plain forward, whose graph is dropped.
void require_grad_mode_of_checkpoint(const fsdp::Unit& unit) {
  TESSERA_CHECK(fsdp::first_forward() == nullptr || !at::GradMode::is_enabled(), ErrorKind::kUsage,
                "unit ", unit.shown_name(),
                ": found grad mode switched on by the function of a checkpoint() around the call, "
                "expected it off in the first run, as checkpoint() leaves it; end the "
                "AutoGradMode(true) before the unit is called");
}

}  // namespace

ShardedBase::Call::Call(ShardedBase& handle)
    : handle_(handle), exceptions_(std::uncaught_exceptions()) {
  fsdp::unit_of_handle(handle.unit_);
}

ShardedBase::Call::~Call() {
  if (auto* watch = watched_ ? DtypeWatch::Observer::of(handle_.unit_->runtime()) : nullptr) {
    watch->leave();
  }
  if (left_ || std::uncaught_exceptions() == exceptions_) return;
  try {
    handle_.unit_->runtime().fail(
        concat("an exception left the forward of unit ", handle_.unit_->shown_name()));
  } catch (const std::exception&) {
    // Telling the others failed too; the exception under way says why.
  }
}

void ShardedBase::Call::enter(const std::vector<at::Tensor*>& inputs) {
  auto& unit = *handle_.unit_;
  auto& runtime = unit.runtime();
  const bool again = fsdp::recomputing() != nullptr;
  if (!again) require_grad_mode_of_checkpoint(unit);
  entry_ = again ? runtime.enter_recompute(unit) : runtime.enter_forward(unit);
  generation_ = runtime.generation();
  if (at::GradMode::is_enabled()) fsdp::require_device(inputs, "argument", unit);
  // The marker stands before the cast, so that the cast's backward is part of the unit's.
  inputs_ = &inputs;
  if (entry_ && at::GradMode::is_enabled()) crossed_ = fsdp::mark_inputs(inputs, entry_);
  if (unit.contract.input) cast_floating(inputs, *unit.contract.input);
  if (auto* watch = DtypeWatch::Observer::of(runtime)) {
    watch->enter(unit, inputs);
    watched_ = true;
  }
}

void ShardedBase::Call::leave(const std::vector<at::Tensor*>& outputs) {
  auto& runtime = handle_.unit_->runtime();
  TESSERA_CHECK(runtime.generation() == generation_, ErrorKind::kUsage, "unit ",
                handle_.unit_->shown_name(),
                ": found that an exception of a unit inside was caught in its forward, expected it "
                "to leave the "
                "sharded step; catch it where the outermost module is called");
  if (auto* watch = watched_ ? DtypeWatch::Observer::of(runtime) : nullptr) watch->leave();
  watched_ = false;
  if (crossed_ != nullptr) crossed_->require_arguments_unchanged(*handle_.unit_);
  const auto& output = handle_.unit_->contract.output;
  if (output) cast_floating(outputs, *output);
  if (runtime.gives_back(*handle_.unit_)) fsdp::require_no_parameters(outputs, *handle_.unit_);
  if (at::GradMode::is_enabled()) fsdp::require_device(outputs, "result", *handle_.unit_);
  // Under recomputation the unit is gathered already: the entry's backward has begun.
  if (entry_ && at::GradMode::is_enabled() && fsdp::recomputing() == nullptr) {
    fsdp::mark_outputs(outputs, *inputs_, entry_);
  }
  runtime.leave_forward(*handle_.unit_);
  left_ = true;
}

}  // namespace tessera
