// All that is known of a run before it starts: its model, contracts and plan, for forecasts that tests
// compare with what the run does.
#pragma once

#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/dry/plan_memory.h"
#include "train/expert_balance.h"
#include "train/hf/model_source.h"
#include "train/plan_of_run.h"
#include "train/plan_of_step.h"

namespace tessera::train {

struct PlannedRun {
  ModelSource source;
  ParallelDims dims;
  ModelContract contract;
  layout::ModelPlan plan;
  PlanMemory memory(const Config& config) const { return plan_memory(config, source, dims); }
  RunOfPlan of(const Config& config) const {
    return {config,
            source.spec,
            source.description,
            dims,
            contract,
            plan,
            aux_loss_coef(config.model.aux_loss_coef, source.spec)};
  }
};

inline PlannedRun planned_run(const Config& config, int ranks) {
  PlannedRun found{
      open_model(config.model), resolve_parallelism(config.parallelism, ranks), {}, {}};
  found.contract = resolve_model(found.source, config, found.dims);
  found.plan =
      plan_model(found.source.description, found.contract.parameters, mesh_shape(found.dims));
  return found;
}

}  // namespace tessera::train
