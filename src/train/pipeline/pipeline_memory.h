// The parameters that a rank of a pipeline shards, and the memory that its step takes, counted in
// dry steps: plan and tables of `inspect --contract`, a column for each rank. Next:
// pipeline_plan.h, ../dry/rank_memory.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "layout/model_plan.h"
#include "models/description.h"
#include "train/dry/rank_memory.h"
#include "train/pipeline/pipeline_plan.h"

namespace tessera::train {

/// The buckets of a rank: the root's, which its stages share (small ones of all their units, a tied
/// embedding), then those of its stages one after the other.
struct RankPlan {
  layout::ModelPlan plan;
  std::vector<models::ParameterSpec> parameters;  ///< the rows of the model's table that it has
  struct Stage {
    int number = 0;
    layout::Range units;
  };
  std::vector<Stage> stages;  ///< in the order of the model
};

/// The plan of each rank of axis pp. `contracts` as resolve_model gives them for `mesh`.
std::vector<RankPlan> plan_ranks(const models::ModelDescription& model,
                                 const std::vector<GradContract>& contracts, const MeshShapes& mesh,
                                 const PipelinePlan& pipeline);

struct PipelineRankMemory {
  RankMemory held;      ///< of the configured mode
  int live_chunks = 0;  ///< most micro-batches of all stages between F and W
  /// The most of a step: what micro-batches keep until their I or B and defer until their W,
  /// gradients, messages. Empty without training.seq_len.
  std::map<RecomputeMode, std::int64_t> activations = {};
  std::int64_t total(RecomputeMode mode) const {
    const auto found = activations.find(mode);
    return held.total() + (found == activations.end() ? 0 : found->second);
  }
};

struct PipelineMemory {
  std::vector<PipelineRankMemory> ranks;  ///< of axis pp, each that needs most of its stages' ranks
  RecomputeMode mode = RecomputeMode::kNone;
  bool knows_activations = false;  ///< training.seq_len is known
  std::int64_t rows = 1;           ///< of a micro-batch
  std::int64_t positions = 0;
  KernelsOf computes_on = KernelsOf::kCpu;
  std::string images = {};  ///< images_text()
};

/// `steps`: of the busiest_rank() of the first rank of each place on axis pp, in stepped_config();
/// the other modes of recomputation are stepped here.
PipelineMemory pipeline_memory(const Config& config, const ModelSource& source,
                               const ParallelDims& dims, const PipelinePlan& pipeline,
                               const std::vector<DryStep>& steps, const ExpertLoads& loads = {});

/// A line a row, a column a rank; up to eight next to each other.
std::string to_string(const PipelineMemory& memory);

}  // namespace tessera::train
