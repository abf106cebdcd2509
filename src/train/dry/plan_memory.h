// Counts what a plan of a run's steps goes by: the bytes that every choice needs, and what
// each layer leaves for its backward in each mode of recomputation, in dry steps.
//
// Three dry steps of eager actions, a mode each, of two micro-batches at most: the others are like
// the second. Next: rank_memory.h, ../plan_of_step.h.
#pragma once

#include "layout/parallel_dims.h"
#include "train/config/config.h"
#include "train/dry/expert_loads.h"
#include "train/hf/model_source.h"
#include "train/plan_of_step.h"

namespace tessera::train {

/// Steps the busiest_rank() of rank 0. Errors: as dry_step().
PlanMemory plan_memory(const Config& config, const ModelSource& source, const ParallelDims& dims,
                       const ExpertLoads& loads = {});

}  // namespace tessera::train
