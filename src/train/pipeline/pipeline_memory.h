// Forecasts what a rank of a pipeline shards, the memory that a step takes and the bytes that it
// sends: plan and tables of `inspect --contract`, a column for each rank.
//
// Beside what rank_memory.h counts it depends on the order of the rank's slots: how many
// micro-batches are between their forward and their backward, and how long a stage's parameters and
// gradients are unsharded. Nobody is started and nothing is allocated. Next: pipeline_plan.h,
// pipeline/simulate.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout/model_plan.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/rank_memory.h"
#include "train/step_traffic.h"

namespace tessera::train {

/// The buckets of a rank: the root's, which its stages share (small ones of all their units, a tied
/// embedding), then those of its stages one after the other.
struct RankPlan {
  layout::ModelPlan plan;
  struct Stage {
    int number = 0;
    layout::Range units;
  };
  std::vector<Stage> stages;  ///< in the order of the model
};

/// Of each rank of axis pp. `contracts` as resolve_model gives them for `mesh`.
std::vector<RankPlan> plan_ranks(const models::ModelDescription& model,
                                 const std::vector<GradContract>& contracts, const MeshShapes& mesh,
                                 const PipelinePlan& pipeline);

/// The inputs of the forecasts of memory and messages for a run of a pipeline.
struct PipelineRun {
  const Config& config;
  const models::ModelSpec& spec;
  const ParallelDims& dims;
  const ModelContract& contract;
  const PipelinePlan& pipeline;
  const std::vector<RankPlan>& ranks;  ///< as plan_ranks gives them
  double aux_loss_coef = 0.0;          ///< as expert_balance.h has it
};

/// The bytes that the sender's place on axis pp sends, messages to other stages included.
StepTraffic step_traffic(const PipelineRun& run, const Sender& sender);

struct PipelineRankMemory {
  RankMemory held;            ///< unsharded and reductions as the order of slots has them
  int live_chunks = 0;        ///< most micro-batches of all stages between F and W
  std::int64_t messages = 0;  ///< sent and not arrived, or posted, at most
  /// What micro-batches keep until their I or B, and put off until their W, at most.
  struct Activations {
    std::int64_t none = 0, full = 0, selective = 0;
    std::int64_t in(RecomputeMode mode) const;
  };
  Activations activations;
  std::int64_t total(RecomputeMode mode) const {
    return held.total() + messages + activations.in(mode);
  }
};

struct PipelineMemory {
  std::vector<PipelineRankMemory> ranks;  ///< of axis pp, each that needs most of its stages' ranks
  RecomputeMode mode = RecomputeMode::kNone;
  bool knows_activations = false;  ///< training.seq_len is known
  std::int64_t rows = 1;           ///< of a micro-batch
  std::int64_t positions = 0;
  ComputesOn computes_on = ComputesOn::kCpu;
};

PipelineMemory pipeline_memory(const PipelineRun& run);

/// A line a row, a column a rank; up to eight beside each other.
std::string to_string(const PipelineMemory& memory);

}  // namespace tessera::train
