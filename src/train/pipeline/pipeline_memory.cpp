#include "train/pipeline/pipeline_memory.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/text/printable.h"
#include "grad/contract_key.h"
#include "grad/enum_words.h"
#include "models/keeps/kept_activations.h"
#include "pipeline/simulate.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "train/plan_of_run.h"

namespace tessera::train {
namespace {

using layout::PlannedUnit;
using models::StageLayers;

/// Where a parameter stands in the order of the model.
struct Standing {
  std::optional<std::int64_t> layer;
  bool before = false;  ///< the first layer
  bool tied = false;    ///< the head has it, too

  bool is_in(const StageLayers& stage) const {
    if (layer) return stage.has_layer(*layer);
    return (stage.embedding && before) || (stage.head && (!before || tied));
  }
};

std::map<std::string, Standing> standings(const models::ModelDescription& model) {
  std::map<std::string, Standing> found;
  bool before = true;
  for (const models::ParameterSpec& row : model.parameters) {
    Standing standing{row.layer, before, false};
    if (standing.layer) before = standing.before = false;
    found.emplace(row.name, standing);
    if (!row.tied_to.empty()) found.at(row.tied_to).tied = true;
  }
  return found;
}

class RankPlanner {
 public:
  RankPlanner(const models::ModelDescription& model, const std::vector<GradContract>& contracts,
              const MeshShapes& mesh)
      : model_(model), contracts_(contracts), mesh_(mesh), standings_(standings(model)) {}

  RankPlan plan(const PipelinePlan& pipeline, int pp_rank) const {
    const auto numbers = pipeline.schedule.stages_of(pp_rank);
    const auto stages = stages_of_rank(pipeline, pp_rank);
    // The part of the model that the rank makes, as the whole one is planned.
    models::ModelDescription part;
    std::vector<GradContract> contracts;
    for (const auto& row : model_.parameters) {
      const std::string& name = row.tied_to.empty() ? row.name : row.tied_to;
      if (is_in_any(name, stages)) part.parameters.push_back(row);
    }
    for (const auto& contract : contracts_) {
      if (is_in_any(contract.name, stages)) contracts.push_back(contract);
    }
    RankPlan rank;
    std::int64_t begin = 1;  // behind the root
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const auto units = units_of_stage(stages[i]);
      part.units.insert(part.units.end(), units.begin(), units.end());
      rank.stages.push_back({numbers[i], {begin, begin + std::ssize(units)}});
      begin = rank.stages.back().units.end;
    }
    rank.plan = plan_model(part, contracts, mesh_);
    rank.parameters = std::move(part.parameters);
    return rank;
  }

 private:
  bool is_in_any(const std::string& name, const models::StagesOfRank& stages) const {
    return std::ranges::any_of(stages,
                               [&](const auto& stage) { return standings_.at(name).is_in(stage); });
  }
  std::vector<std::string> units_of_stage(const StageLayers& stage) const {
    std::vector<std::string> units;
    for (const std::string& unit : model_.units) {
      const bool is_here = std::ranges::any_of(model_.parameters, [&](const auto& row) {
        return row.unit == unit && standings_.at(row.name).is_in(stage);
      });
      if (is_here) units.push_back(unit);
    }
    return units;
  }

  const models::ModelDescription& model_;
  const std::vector<GradContract>& contracts_;
  const MeshShapes mesh_;
  const std::map<std::string, Standing> standings_;
};

/// What of a rank's plan one stage is, or what its stages share.
layout::ModelPlan part_of(const RankPlan& rank, layout::Range of) {
  const auto units = rank.plan.units.begin();
  return {rank.plan.options, {units + of.begin, units + of.end}};
}

/// The contracts of what a plan has.
std::vector<GradContract> contracts_in(const layout::ModelPlan& plan,
                                       const std::vector<GradContract>& all) {
  std::set<std::string_view> names;
  for (const PlannedUnit& unit : plan.units) {
    for (const auto& item : unit.items) names.insert(item.name);
  }
  std::vector<GradContract> found;
  std::ranges::copy_if(all, std::back_inserter(found),
                       [&](const auto& each) { return names.contains(each.name); });
  return found;
}

/// Bytes of one stage of a rank, and of one that computes.
struct StageBytes {
  RankMemory held = {};
  std::int64_t whole = 0;         ///< unsharded
  std::int64_t unit_by_unit = 0;  ///< unsharded, as far as one forward or backward needs it
  std::int64_t slots = 0;
};

StageBytes bytes_of(const layout::ModelPlan& plan, const std::vector<GradContract>& all,
                    RankMemoryOptions options) {
  StageBytes bytes;
  if (plan.units.empty()) return bytes;  // a stage whose parameters all lie in the rank's root
  const auto contracts = contracts_in(plan, all);
  options.reshard = Reshard::kYes;
  bytes.held = rank_memory(contracts, plan, options);
  bytes.unit_by_unit = bytes.held.unsharded;
  bytes.slots = bytes.held.reductions;
  options.reshard = Reshard::kNo;
  bytes.whole = rank_memory(contracts, plan, options).unsharded;
  return bytes;
}

/// The slots of a rank in which something of a stage is there.
struct StageWindows {
  layout::Range unsharded;  ///< from the first F to the last I or B
  layout::Range gradients;  ///< from the first I or B to the last W or B
};
void reach(layout::Range& window, std::int64_t slot) {
  if (window.empty()) window.begin = slot;
  window.end = slot + 1;
}
bool has(const layout::Range& window, std::int64_t slot) {
  return window.begin <= slot && slot < window.end;
}

std::map<int, StageWindows> windows_of(const std::vector<pipeline::Slot>& slots) {
  std::map<int, StageWindows> found;
  for (std::int64_t i = 0; i < std::ssize(slots); ++i) {
    slots[static_cast<std::size_t>(i)].each([&](const pipeline::Action& action) {
      StageWindows& windows = found[action.stage];
      if (action.kind != pipeline::ActionKind::kWeightGradient) reach(windows.unsharded, i);
      if (action.kind != pipeline::ActionKind::kForward) reach(windows.gradients, i);
    });
  }
  return found;
}

/// Held and computed with, over the slots of a rank.
RankMemory held_of(const RankPlan& rank, const std::vector<pipeline::Slot>& slots,
                   const PipelinePlan& pipeline, const std::vector<GradContract>& contracts,
                   const RankMemoryOptions& options) {
  RankMemory sum = bytes_of(part_of(rank, {0, 1}), contracts, options).held;
  std::map<int, StageBytes> stages;
  for (const RankPlan::Stage& stage : rank.stages) {
    const auto bytes = bytes_of(part_of(rank, stage.units), contracts, options);
    stages.emplace(stage.number, bytes);
    sum.parameters += bytes.held.parameters;
    sum.gradients += bytes.held.gradients;
    sum.moments += bytes.held.moments;
    sum.master += bytes.held.master;
    sum.raw_gradient = std::max(sum.raw_gradient, bytes.held.raw_gradient);
  }
  const auto windows = windows_of(slots);
  std::int64_t unsharded = 0, reductions = 0;
  for (std::int64_t i = 0; i < std::ssize(slots); ++i) {
    std::int64_t whole = 0, unit_by_unit = 0, waiting = 0, under_way = 0;
    for (const auto& [number, of] : windows) {
      const StageBytes& bytes = stages.at(number);
      if (has(of.unsharded, i)) whole += bytes.whole;
      if (has(of.gradients, i)) waiting += bytes.slots;
      under_way = std::max(under_way, bytes.slots);
    }
    slots[static_cast<std::size_t>(i)].each([&](const pipeline::Action& action) {
      if (action.kind == pipeline::ActionKind::kWeightGradient) return;
      unit_by_unit += stages.at(action.stage).unit_by_unit;
    });
    const bool once = pipeline.reshard == PipelineReshard::kStep;
    unsharded = std::max(unsharded, once ? whole : unit_by_unit);
    reductions = std::max(reductions, options.defers_reductions ? waiting : under_way);
  }
  sum.unsharded += unsharded;
  sum.reductions += reductions;
  return sum;
}

/// As many rows as the rank with most has in a micro-batch.
std::int64_t rows_of_micro_batch(const Config& config, const ParallelDims& dims) {
  const std::int64_t local = config.training.local_batch_size.value_or(1);
  const std::int64_t global = config.training.global_batch_size;
  if (global <= 0) return local;
  return std::min(local, (global + dims.data_ranks() - 1) / dims.data_ranks());
}

/// With the costs of the plan, an I and a W as much as an F each, and these bytes.
pipeline::Simulated simulated(const PipelinePlan& plan,
                              const std::vector<models::KeptActivations>& kept,
                              RecomputeMode mode) {
  pipeline::Costs costs(plan.costs.size());
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    const double cost = plan.costs[stage];
    costs[stage].forward = costs[stage].input_gradient = costs[stage].weight_gradient = cost;
    if (kept.empty()) continue;
    costs[stage].live_bytes = static_cast<double>(kept[stage].in(mode).kept);
    costs[stage].deferred_bytes = static_cast<double>(kept[stage].deferred);
  }
  return plan.own_messages ? simulate(*plan.own_messages, costs) : simulate(plan.schedule, costs);
}

/// The most that a layer which is run again adds, of a rank's stages.
std::int64_t again(const std::vector<int>& stages, const std::vector<models::KeptActivations>& kept,
                   RecomputeMode mode) {
  std::int64_t most = 0;
  for (const int stage : stages) {
    const auto& one = kept[static_cast<std::size_t>(stage)].in(mode);
    most = std::max(most, one.peak - one.kept);
  }
  return most;
}

std::string cell(const std::string& text, std::size_t width) {
  return std::string(text.size() < width ? width - text.size() : 1, ' ') + text;
}

}  // namespace

std::vector<RankPlan> plan_ranks(const models::ModelDescription& model,
                                 const std::vector<GradContract>& contracts, const MeshShapes& mesh,
                                 const PipelinePlan& pipeline) {
  const RankPlanner planner(model, contracts, mesh);
  std::vector<RankPlan> ranks;
  for (int rank = 0; rank < pipeline.schedule.ranks(); ++rank) {
    ranks.push_back(planner.plan(pipeline, rank));
  }
  return ranks;
}

namespace {

models::KeptActivations kept_by_stage(const PipelineRun& run, int stage, int tp_rank) {
  models::ForwardCase forward =
      forward_case(run.config, run.spec, run.dims, run.contract, run.aux_loss_coef);
  forward.stage = stage_layers(run.pipeline, stage);
  forward.tp_rank = tp_rank;
  return models::kept_activations(forward);
}

/// The bytes of the messages of one micro-batch over both borders of a stage.
std::int64_t message_bytes(const PipelineRun& run, int stage, const models::KeptActivations& kept) {
  const auto& rank_of = run.pipeline.schedule.rank_of;
  const auto leaves_for = [&](int other) {
    return other >= 0 && other < run.pipeline.schedule.stages() &&
           rank_of[static_cast<std::size_t>(other)] != rank_of[static_cast<std::size_t>(stage)];
  };
  // The counts of chosen experts travel along, and return as the sum over all stages.
  const std::int64_t counts =
      run.aux_loss_coef > 0 ? models::routed_experts(run.spec).experts * 8 : 0;
  std::int64_t bytes = leaves_for(stage + 1) ? kept.stream + counts : 0;
  if (leaves_for(stage - 1)) bytes += (kept.input_wants ? kept.stream : 0) + counts;
  return bytes;
}

StepTraffic::OfTokens sent_by_stages(const PipelineRun& run, const std::vector<int>& stages,
                                     const MeshShapes& mesh, const Sender& sender) {
  StepTraffic::OfTokens sum{.is_even = sender.loads == nullptr};
  const std::int64_t micro_batches = run.pipeline.schedule.micro_batches;
  for (const int stage : stages) {
    const auto kept = kept_by_stage(run, stage, mesh.coordinate(sender.rank, axis::kTensor));
    const layout::Range layers = stage_layers(run.pipeline, stage).layers;
    const std::vector<RecomputeMode> modes(static_cast<std::size_t>(layers.size()),
                                           run.config.activation_checkpoint.of_layers());
    const auto one = sent_of_tokens(
        {.spec = run.spec, .kept = kept, .first_layer = layers.begin, .modes = modes},
        micro_batches, mesh, sender);
    sum.activations += one.activations;
    sum.experts += one.experts;
    sum.messages += micro_batches * message_bytes(run, stage, kept);
  }
  return sum;
}

/// Whether a backward reaches each parameter: it, or one before it in the model, is trained.
std::map<std::string_view, bool> reached_parameters(const ModelContract& contract) {
  std::map<std::string_view, bool> reached;
  bool any = false;
  for (const GradContract& parameter : contract.parameters) {
    any = any || parameter.trainable;
    reached.emplace(parameter.name, any);
  }
  return reached;
}

}  // namespace

StepTraffic step_traffic(const PipelineRun& run, const Sender& sender) {
  const PipelinePlan& pipeline = run.pipeline;
  const layout::ModelPlan& plan = run.ranks.front().plan;
  const MeshShapes& mesh = plan.options.mesh;
  const int place = mesh.coordinate(sender.rank, axis::kPipeline);
  const RankPlan& planned = run.ranks.at(static_cast<std::size_t>(place));
  const auto& units = planned.plan.units;
  const std::int64_t micro_batches = pipeline.schedule.micro_batches;
  const auto reached = reached_parameters(run.contract);
  const auto gathers_of = [&](const PlannedUnit& unit) {
    if (pipeline.reshard == PipelineReshard::kStep || &unit == &units.front()) {
      return std::int64_t{1};  // what stages share stays, too
    }
    const bool again =
        std::ranges::any_of(unit.items, [&](const auto& item) { return reached.at(item.name); });
    return (again ? 2 : 1) * micro_batches;
  };
  const std::int64_t reductions = run.config.training.sync_every_micro_batch ? micro_batches : 1;
  StepTraffic traffic{.micro_batches = micro_batches};
  for (const PlannedUnit& unit : units) {
    const std::int64_t gathers = gathers_of(unit);
    for (const layout::BucketPlan& bucket : unit.plan.buckets) {
      const auto sent = [&](std::int64_t bytes) { return layout::sent_bytes(bytes, bucket.ranks); };
      traffic.gathers += gathers * sent(layout::gathered_bytes(bucket));
      traffic.reductions += reductions * sent(layout::reduced_bytes(bucket));
      traffic.replicas += replica_sent_bytes(bucket, mesh, sender.rank);
    }
  }
  traffic.matrices = sent_of_matrices(run.config, planned.parameters, run.contract.parameters,
                                      planned.plan, sender.rank);
  if (!run.config.training.seq_len) return traffic;
  traffic.of_tokens = sent_by_stages(run, pipeline.schedule.stages_of(place), mesh, sender);
  return traffic;
}

std::int64_t PipelineRankMemory::Activations::in(RecomputeMode mode) const {
  if (mode == RecomputeMode::kFull) return full;
  return mode == RecomputeMode::kSelective ? selective : none;
}

PipelineMemory pipeline_memory(const PipelineRun& run) {
  const auto& [config, spec, dims, contract, pipeline, ranks, aux_loss_coef] = run;
  PipelineMemory memory{.ranks = {},
                        .mode = config.activation_checkpoint.of_layers(),
                        .knows_activations = config.training.seq_len.has_value(),
                        .rows = rows_of_micro_batch(config, dims),
                        .positions = config.training.seq_len.value_or(0)};
  RankMemoryOptions options = rank_memory_options(config, dims, contract);
  options.defers_reductions = !config.training.sync_every_micro_batch;
  std::vector<models::KeptActivations> kept;
  if (memory.knows_activations) {
    for (int stage = 0; stage < pipeline.schedule.stages(); ++stage) {
      kept.push_back(kept_by_stage(run, stage, 0));
    }
  }
  const auto chunks = peak_live_chunks(pipeline.schedule);
  const auto none = simulated(pipeline, kept, RecomputeMode::kNone);
  const auto full = simulated(pipeline, kept, RecomputeMode::kFull);
  const auto selective = simulated(pipeline, kept, RecomputeMode::kSelective);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    PipelineRankMemory one;
    one.held =
        held_of(ranks[rank], pipeline.schedule.slots[rank], pipeline, contract.parameters, options);
    one.live_chunks = chunks[rank];
    if (memory.knows_activations) {
      const auto stages = pipeline.schedule.stages_of(static_cast<int>(rank));
      const auto bytes = [&](const pipeline::Simulated& of, RecomputeMode mode) {
        return static_cast<std::int64_t>(of.ranks[rank].peak_bytes) + again(stages, kept, mode);
      };
      one.activations = {.none = bytes(none, RecomputeMode::kNone),
                         .full = bytes(full, RecomputeMode::kFull),
                         .selective = bytes(selective, RecomputeMode::kSelective)};
      // Beside those that are open a receive of each direction, posted a slot ahead. (Of
      // messages up to 16 KiB more are posted: 128 KiB at most, not counted.)
      one.messages = (none.ranks[rank].most_open_sends + 2) * kept.front().stream;
    }
    memory.ranks.push_back(one);
  }
  return memory;
}

std::string to_string(const PipelineMemory& memory) {
  constexpr std::size_t kColumns = 8, kFirst = 26, kWidth = 12;
  std::string text =
      concat("memory of a rank of each place in the pipeline (of the one that needs most)\n",
             kernels_line(memory.computes_on));
  for (std::size_t begin = 0; begin < memory.ranks.size(); begin += kColumns) {
    const std::size_t end = std::min(memory.ranks.size(), begin + kColumns);
    const auto row = [&](std::string name, const auto& value) {
      name = "  " + name;
      name.resize(std::max(name.size(), kFirst), ' ');
      for (std::size_t i = begin; i < end; ++i) name += cell(value(i), kWidth);
      text += name + "\n";
    };
    const auto bytes = [&](const std::string& name, const auto& value) {
      row(name, [&](std::size_t i) { return size_text(value(memory.ranks[i])); });
    };
    const auto held = [&](const std::string& name, std::int64_t RankMemory::* line) {
      bytes(name, [&](const PipelineRankMemory& rank) { return rank.held.*line; });
    };
    row("", [&](std::size_t i) { return concat("pp ", i); });
    held("parameters", &RankMemory::parameters);
    held("gradients", &RankMemory::gradients);
    held("moments", &RankMemory::moments);
    held("master", &RankMemory::master);
    held("unsharded peak", &RankMemory::unsharded);
    held("reductions", &RankMemory::reductions);
    held("raw gradient", &RankMemory::raw_gradient);
    bytes("all of these", [](const PipelineRankMemory& rank) { return rank.held.total(); });
    row("live micro-batches", [&](std::size_t i) { return concat(memory.ranks[i].live_chunks); });
    if (!memory.knows_activations) continue;
    bytes("messages", [](const PipelineRankMemory& rank) { return rank.messages; });
    for (const auto& each : words_of(RecomputeMode{})) {
      bytes(concat("activations, ", each.word),
            [&](const PipelineRankMemory& rank) { return rank.activations.in(each.value); });
    }
    bytes("all in this run",
          [&](const PipelineRankMemory& rank) { return rank.total(memory.mode); });
  }
  if (!memory.knows_activations) return text + kActivationsUnknown;
  return text + concat("  activations: of micro-batches of ", memory.rows, " x ", memory.positions,
                       " tokens, by activation_checkpoint.mode, with what W waits for\n");
}

}  // namespace tessera::train
