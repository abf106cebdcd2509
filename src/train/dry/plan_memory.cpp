#include "train/dry/plan_memory.h"

#include <algorithm>
#include <set>
#include <string>

#include "base/text/printable.h"
#include "capture/dry/forward_activations.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_step.h"
#include "train/dry/rank_memory.h"

namespace tessera::train {
namespace {

std::set<std::string> layers_of(const models::ModelDescription& model) {
  std::set<std::string> layers;
  for (const auto& parameter : model.parameters) {
    if (parameter.layer) layers.emplace(unit_label(parameter.unit));
  }
  return layers;
}

capture::StepMemory outside_pool(const DryStep& step) {
  return capture::outside_pool(step.between_steps, step.peak, step.held.pool, step.passes);
}

}  // namespace

PlanMemory plan_memory(const Config& config, const ModelSource& source, const ParallelDims& dims,
                       const ExpertLoads& loads) {
  const int rank = busiest_rank(loads, mesh_shape(dims), 0);
  const auto step_in = [&](RecomputeMode mode) {
    Config stepped = stepped_config(config, dims, mode);
    auto& training = stepped.training;
    const std::int64_t micro_batch = training.local_batch_size.value_or(1) * dims.data_ranks();
    training.global_batch_size = std::min(training.global_batch_size, 2 * micro_batch);
    // Form 1 lets gradients wait for the last micro-batch, form 2 does not.
    if (config.compile.form == 2) training.sync_every_micro_batch = true;
    return dry_step(stepped, source, rank, dims.world_size(), {.loads = loads});
  };
  const DryStep none = step_in(RecomputeMode::kNone);
  const RankMemory held = rank_memory(none);
  PlanMemory memory;
  memory.state = held.moments + held.master;
  memory.others = held.parameters + held.gradients + held.reductions;
  if (!config.training.seq_len) return memory;
  const auto found =
      capture::counted_activations({.none = outside_pool(none),
                                    .selective = outside_pool(step_in(RecomputeMode::kSelective)),
                                    .full = outside_pool(step_in(RecomputeMode::kFull))},
                                   layers_of(source.description));
  memory.passing = found.passing;
  memory.others += memory.passing;
  memory.activations = found.forward;
  return memory;
}

}  // namespace tessera::train
