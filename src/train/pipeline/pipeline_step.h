// The pipeline of a run at work: the stages of this rank's model, run micro-batch by micro-batch by
// the schedule, for training, for validation and for logits.
//
// A stage of a language model passes the residual stream on; with an auxiliary loss also how often
// experts were chosen so far, whose total the last stage knows and sends back with the gradients:
// each stage then differentiates its own routers' probabilities by the same numbers as a model
// without a pipeline. Next: pipeline_plan.h for the schedule, pipeline/runner.h, ../step.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "models/language_model.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"
#include "train/data/data.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/step.h"

namespace tessera::train {

/// The stream between a model's stages, beyond the rows of a micro-batch.
struct StreamBorders {
  at::ScalarType dtype = at::kFloat;  ///< of the stream
  std::int64_t sequence_parts = 1;    ///< of T: a rank of tp has one of them (sequence parallel)
  /// For each stage but the last: whether a gradient comes back, since a layer before is trained.
  std::vector<bool> has_gradient;
};
/// `contract`: of the whole model.
StreamBorders stream_borders(const PipelinePlan& plan, const ParallelDims& dims,
                             const models::ModelDescription& model, const ModelContract& contract);

/// The rows of one step.
struct StepOfStages {
  std::vector<MicroBatch> batches;  ///< where the model is; their tensors are shared
  std::vector<RowRange> rows;
  std::int64_t step = 0;
  StepOptions options = {};
  std::int64_t kept = 0;  ///< labels of the whole batch
  double aux_loss_coef = 0;
};

class PipelineOfRun {
 public:
  /// `model` is made of stages_of_rank(plan, ...) and must live as long. Collective.
  PipelineOfRun(PipelinePlan plan, StreamBorders borders, Sharded<models::LanguageModel>& model);
  ~PipelineOfRun();
  PipelineOfRun(const PipelineOfRun&) = delete;
  PipelineOfRun& operator=(const PipelineOfRun&) = delete;

  const PipelinePlan& plan() const { return plan_; }

  /// Runs all micro-batches, forward and backward: the shards have gradients afterwards. Returns
  /// what each stage of this rank has found. Collective. Errors: as pipeline::Runner::run.
  std::vector<Found> forward_backward(const StepOfStages& step);
  /// The losses alone, of any number of micro-batches. Collective.
  std::vector<Found> forward_only(const StepOfStages& step);
  /// Logits [b, T, V] of each micro-batch, on the ranks of the last stage. Collective.
  std::vector<at::Tensor> logits(const StepOfStages& step);

 private:
  struct Parts;
  std::vector<Found> found() const;

  PipelinePlan plan_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace tessera::train
