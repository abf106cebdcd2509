// The pipeline of a run as a value: which stage has which layers, which rank has which stages, and
// what each rank does in which order.
//
// It follows from configuration, model and number of micro-batches alone, so that every rank works
// out the same one and `inspect --contract` shows it for any number of ranks. No rank is asked and
// nothing is allocated. Next: pipeline/schedule.h, pipeline/split.h, config/config_resolve.h for
// the number of micro-batches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/description.h"
#include "models/model_spec.h"
#include "models/stage_layers.h"
#include "pipeline/interleave.h"
#include "pipeline/program.h"
#include "pipeline/schedule.h"
#include "pipeline/simulate.h"
#include "pipeline/split.h"
#include "tessera/model_contract.h"
#include "train/config/config.h"

namespace tessera::train {

struct PipelinePlan {
  std::string name;  ///< of the schedule: its kind, or the file it comes from
  pipeline::Schedule schedule;
  /// The messages of a file that says when they are sent. None: they follow from the schedule.
  std::optional<pipeline::Program> own_messages = {};
  pipeline::Split split;
  std::vector<double> costs;  ///< of each stage: operations of a forward, per token
  PipelineReshard reshard = PipelineReshard::kStep;
  pipeline::Overlap overlap = pipeline::Overlap::kExperts;
  /// Remarks on what is valid, but logged once: a file that leaves the order of micro-batches.
  std::vector<std::string> remarks = {};
  bool operator==(const PipelinePlan&) const = default;
};

/// A line for the whole and one a stage.
std::string to_string(const PipelinePlan& plan);
/// A hash of everything that ranks have to agree on. The same on every machine for equal plans.
std::uint64_t hash(const PipelinePlan& plan);

/// The sizes of a step's batch that count here.
struct PipelineBatch {
  std::int64_t micro_batches = 1;
  /// T; 0 = not known: then attention's products count for nothing in the costs of layers.
  std::int64_t row_tokens = 0;
};

/// None without has_schedule(config). Reads schedule_file. Errors: kConfig naming the key,
/// with the numbers: too few layers or micro-batches, a split or stages_per_rank that does not fit,
/// a file that does not validate or is for others; kIo, kFormat for one that cannot be read.
std::optional<PipelinePlan> resolve_pipeline(const Config& config, const ParallelDims& dims,
                                             const models::ModelSpec& spec,
                                             const models::ModelDescription& model,
                                             const PipelineBatch& batch);

/// Says in the contracts of the whole model which parameters two stages have on different ranks: an
/// embedding that is the head's weight, too (ReductionPlan::copies).
void note_copies(const PipelinePlan& plan, const models::ModelDescription& model,
                 ModelContract& contract);

/// Operations of a forward, per token: of each layer, and of what follows the last one. What stands
/// before the first costs nothing: an embedding is a copy, and images are not counted.
pipeline::LayerCosts layer_costs(const models::ModelSpec& spec,
                                 const models::ModelDescription& model, std::int64_t row_tokens);

/// The costs of a micro-batch on a rank where one operation costs `of_operation`: a forward, as
/// many operations for the input gradients, with another forward where layers are recomputed (of
/// mode selective capture::kSelectiveShare of one), and for the weight gradients. `sharing`: the
/// ranks that share its work, cp x tp. Needs training.seq_len.
pipeline::Costs stage_costs(const PipelinePlan& plan, const Config& config, int sharing,
                            double of_operation);

models::StageLayers stage_layers(const PipelinePlan& plan, int stage);
/// In the order of the model.
models::StagesOfRank stages_of_rank(const PipelinePlan& plan, int pp_rank);

}  // namespace tessera::train
