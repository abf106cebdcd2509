#include "tessera/step_scope.h"

#include <exception>
#include <utility>

#include "base/interrupt.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/shard.h"

namespace tessera {

/// Keeps the runtime alive as long as the scope, which the runtime does not own.
struct StepScope::Impl {
  std::shared_ptr<fsdp::Runtime> runtime;
  std::shared_ptr<fsdp::OpenStep> step;
};

StepScope::StepScope(ShardedBase& model, StepScopeOptions options)
    : impl_(std::make_unique<Impl>()) {
  impl_->runtime = fsdp::unit_of_handle(model.unit()).runtime().shared_from_this();
  impl_->step = impl_->runtime->open_step(std::move(options));
}

StepScope::~StepScope() {
  const base::NoInterrupts until_the_others_know;
  try {
    impl_->runtime->give_up(*impl_->step);
  } catch (const std::exception&) {
    // The abort failed too; the exception under way tells the reason.
  }
}

void StepScope::begin_forward(int stage, std::int64_t micro_batch) {
  impl_->step->begin_forward(stage, micro_batch);
}

void StepScope::begin_backward(int stage, std::int64_t micro_batch, Backward backward) {
  impl_->step->begin_backward(stage, micro_batch, backward);
}

void StepScope::run_pair(const StepForward& forward, const StepBackward& backward) {
  impl_->step->run_pair(forward, backward);
}

void StepScope::run_weight_gradients(int stage, std::int64_t micro_batch) {
  impl_->step->run_weight_gradients(stage, micro_batch);
}

void StepScope::reshard(int stage) { impl_->step->reshard(stage); }

void StepScope::reduce(int stage) { impl_->step->reduce(stage); }

void StepScope::finish() { impl_->step->finish(); }

bool StepScope::records() const { return impl_->step->records(); }

}  // namespace tessera
