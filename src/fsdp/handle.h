// What floors above ask of a handle beyond tessera/shard.h: none of them knows what runs it.
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

/// The bucket plan of a sharded model as the value that it was laid out from: for printing and
/// comparing. Of the whole tree under `model`, which is the outermost handle. Not collective.
layout::ModelPlan plan_of(const ShardedBase& model);

/// After a failure that World::recover() has ended: first in whatever may follow one.
void renew_after_failure(const ShardedBase& model);
/// That no step of `model` is under way. Errors: kUsage, named `what`.
void require_idle(const ShardedBase& model, const char* what);
/// That `optimizer` steps parameters of `model`, as they lie now. Errors: kUsage, named `what`.
void require_steps_of(const ShardedBase& model, const Optimizer& optimizer, const char* what);

/// Step scopes of `model`, the outermost handle, follow the planner's plans from here on; an empty
/// one: eager plans. `while_recording`: how what plans may recompute is recomputed in a step that has
/// none yet. On every rank. Errors: kUsage in a step.
void set_planner(const ShardedBase& model, Planner planner,
                 RecomputeMode while_recording = RecomputeMode::kNone);

/// What replays regions of `model`, the outermost handle, from here on; null: nobody. Errors: kUsage
/// in a step.
void set_regions(const ShardedBase& model, std::shared_ptr<grad::Regions> regions);
std::shared_ptr<grad::Regions> regions_of(const ShardedBase& model);
/// The unit, as plans name it, that a parameter of a sharded module lies in; "" = none.
std::string unit_of(const at::Tensor& parameter);
/// Whether a parameter of a sharded module is there in backward (set_unshard_in_backward).
bool is_there_in_backward(const at::Tensor& parameter);

/// Units of `model`, the outermost handle, as plans of its steps see them now.
std::vector<PlanUnit> plan_units(const ShardedBase& model);

/// Recomputes all that plans may recompute in this mode, as its user would (Recomputable::set_recompute).
void set_planned_recompute(const ShardedBase& model, RecomputeMode mode);
/// By unit: how the last step scope recomputed it, as its user or its plan has said.
std::vector<RecomputeMode> followed_recompute(const ShardedBase& model);
/// What the last step scope that followed a plan followed; null: none has.
std::shared_ptr<const StepPlan> followed_plan(const ShardedBase& model);

/// "the forward of unit layers.3": what the rank was in when it could not go on; "" = in none yet.
std::string last_entered(const ShardedBase& model);

/// A copy on a device reads the parameters, buffers and what optimizers keep of them, up to `end`:
/// Optimizer::step() comes behind it.
void are_read(const ShardedBase& model, const comm::Event& end);
/// So does from here on whatever else is launched on the caller's stream.
void order_after_reads(const ShardedBase& model);

}  // namespace tessera::fsdp
