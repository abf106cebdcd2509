// Functions of a handle, beyond tessera/shard.h, for libraries that do not know the runtime.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/stream.h"
#include "fsdp/agreed/step_plan.h"
#include "grad/region.h"
#include "layout/model_plan.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// Returns the bucket plan of the whole tree under `model`, the outermost handle, as the value that
/// it was laid out from, for printing and comparing. Not collective.
layout::ModelPlan plan_of(const ShardedBase& model);

/// Resets the model after a failure that World::recover() has ended. Every call that may be the
/// first one after a failure begins with it.
void renew_after_failure(const ShardedBase& model);
/// Requires that no step of `model` is under way. Errors: kUsage, naming `what`.
void require_idle(const ShardedBase& model, const char* what);
/// Requires that `optimizer` updates parameters of `model` in their present layout. Errors: kUsage,
/// naming `what`.
void require_steps_of(const ShardedBase& model, const Optimizer& optimizer, const char* what);

/// Makes step scopes of `model`, the outermost handle, follow the planner's plans from now on;
/// without a planner they are eager. `while_recording`: the recompute mode in steps without a plan
/// yet, for units whose mode a plan may choose. Must be called on every rank. Errors: kUsage in a
/// step.
void set_planner(const ShardedBase& model, Planner planner,
                 RecomputeMode while_recording = RecomputeMode::kNone);

/// Sets what replays regions of `model`, the outermost handle, from now on; null replays none.
/// Errors: kUsage in a step.
void set_regions(const ShardedBase& model, std::shared_ptr<grad::Regions> regions);
std::shared_ptr<grad::Regions> regions_of(const ShardedBase& model);
/// Returns the name, in plans, of the unit of a parameter of a sharded module; "" for none.
std::string unit_of(const at::Tensor& parameter);
/// Whether a parameter of a sharded module is unsharded in backward (set_unshard_in_backward).
bool is_there_in_backward(const at::Tensor& parameter);

/// Returns the units of `model`, the outermost handle, as plans of its steps see them now.
std::vector<PlanUnit> plan_units(const ShardedBase& model);

/// Sets this recompute mode for all modules whose mode plans may choose, as a user does
/// (Recomputable::set_recompute).
void set_planned_recompute(const ShardedBase& model, RecomputeMode mode);
/// Returns the recompute mode of each unit in the last step scope, chosen by its user or its plan.
std::vector<RecomputeMode> followed_recompute(const ShardedBase& model);
/// Returns the plan of the last step scope that followed one; null where none has.
std::shared_ptr<const StepPlan> followed_plan(const ShardedBase& model);

/// Returns the forward or backward that the rank entered last, "the forward of unit layers.3", for
/// messages of failures; "" before the first.
std::string last_entered(const ShardedBase& model);

/// Orders Optimizer::step() after `end`, the end of a copy on a device that reads the parameters,
/// the buffers and the optimizers' state.
void are_read(const ShardedBase& model, const comm::Event& end);
/// Orders everything that is launched on the caller's stream from now on after that copy, too.
void order_after_reads(const ShardedBase& model);

}  // namespace tessera::fsdp
