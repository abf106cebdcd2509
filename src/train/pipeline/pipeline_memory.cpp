#include "train/pipeline/pipeline_memory.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/text/printable.h"
#include "grad/enum_words.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_batches.h"
#include "train/plan_of_run.h"

namespace tessera::train {
namespace {

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

PipelineMemory pipeline_memory(const Config& config, const ModelSource& source,
                               const ParallelDims& dims, const PipelinePlan& pipeline,
                               const std::vector<DryStep>& steps, const ExpertLoads& loads) {
  PipelineMemory memory{.ranks = {},
                        .mode = config.activation_checkpoint.of_layers(),
                        .knows_activations = config.training.seq_len.has_value(),
                        .rows = stepped_config(config, dims).training.local_batch_size.value_or(1),
                        .positions = config.training.seq_len.value_or(0),
                        .images = images_text(config, source)};
  const auto chunks = peak_live_chunks(pipeline.schedule);
  const MeshShapes mesh = mesh_shape(dims);
  const auto firsts = mesh.ranks_of(0, {axis::kPipeline});
  for (std::size_t rank = 0; rank < steps.size(); ++rank) {
    PipelineRankMemory one{.held = rank_memory(steps[rank]), .live_chunks = chunks[rank]};
    for (const auto& [word, mode] : words_of(RecomputeMode{})) {
      if (!memory.knows_activations) break;
      one.activations[mode] =
          mode == memory.mode
              ? activation_bytes(steps[rank], one.held).peak
              : activation_bytes(dry_step(stepped_config(config, dims, mode), source,
                                          busiest_rank(loads, mesh, firsts[rank]),
                                          dims.world_size(), {.loads = loads}),
                                 one.held)
                    .peak;
    }
    memory.ranks.push_back(std::move(one));
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
    bytes("all of these", [](const PipelineRankMemory& rank) { return rank.held.total(); });
    row("live micro-batches", [&](std::size_t i) { return concat(memory.ranks[i].live_chunks); });
    if (!memory.knows_activations) continue;
    for (const auto& each : words_of(RecomputeMode{})) {
      bytes(concat("activations, ", each.word),
            [&](const PipelineRankMemory& rank) { return rank.activations.at(each.value); });
    }
    bytes("all in this run",
          [&](const PipelineRankMemory& rank) { return rank.total(memory.mode); });
  }
  if (!memory.images.empty()) text += concat("  ", memory.images, "\n");
  if (!memory.knows_activations) return text + kActivationsUnknown;
  return text +
         concat("  activations: of micro-batches of ", memory.rows, " x ", memory.positions,
                " tokens, by activation_checkpoint.mode, with what W waits for and messages\n");
}

}  // namespace tessera::train
