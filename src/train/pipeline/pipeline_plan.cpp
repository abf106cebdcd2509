#include "train/pipeline/pipeline_plan.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <string_view>

#include "base/hash.h"
#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "capture/plan_profile.h"
#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "tessera/step_scope.h"
#include "train/config/config_resolve.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kMostScheduleBytes = std::int64_t{64} << 20;

/// Positions that one position attends to, on average over a row.
double positions_seen(std::int64_t row_tokens, std::optional<std::int64_t> window) {
  if (row_tokens == 0) return 0.0;
  const auto all = static_cast<double>(row_tokens);
  if (!window || *window >= row_tokens) return (all + 1.0) / 2.0;
  const auto most = static_cast<double>(*window);
  return most - most * (most - 1.0) / (2.0 * all);
}

/// Scores and weighted values, a multiplication and an addition each.
double attention_cost(const models::ModelSpec& spec, std::int64_t layer, std::int64_t row_tokens) {
  const models::LayerAttention of = models::attention_of(spec, layer);
  return 2.0 * static_cast<double>(spec.num_attention_heads) * static_cast<double>(of.dims) *
         positions_seen(row_tokens, of.window);
}

struct NamedSchedule {
  std::string name;
  pipeline::Schedule schedule;
  std::vector<std::string> remarks;
  std::optional<pipeline::Program> own_messages = {};
};

/// As its kind makes it.
NamedSchedule schedule_of_kind(const PipelineConfig& asked, int ranks, std::int64_t micro_batches) {
  const auto kind = pipeline::find_kind(asked.schedule);
  TESSERA_CHECK(kind, ErrorKind::kConfig, "pipeline.schedule: found ", printable(asked.schedule),
                ", expected one of ", pipeline::kind_names());
  const pipeline::KindRow& row = pipeline::row_of(*kind);
  const int stages_per_rank = asked.stages_per_rank.value_or(row.stages_per_rank);
  TESSERA_CHECK(row.any_stages || stages_per_rank == row.stages_per_rank, ErrorKind::kConfig,
                "pipeline.stages_per_rank: found ", stages_per_rank, ", expected ",
                row.stages_per_rank, " for pipeline.schedule ", row.name,
                "; Interleaved1F1B and InterleavedZeroBubble take other numbers");
  const auto most = std::int64_t{pipeline::kMostMicroBatches} + 1;  // refused with its bound
  const pipeline::Shape shape{ranks, stages_per_rank,
                              static_cast<int>(std::min(micro_batches, most))};
  const auto named = [](std::string_view remedy, const auto& make) {
    try {
      return make();
    } catch (const Error& error) {
      throw Error(error.kind(), concat("pipeline.schedule: ", error.what(), remedy));
    }
  };
  named("", [&] { return pipeline::place_stages(row.placement, ranks, stages_per_rank); });
  // Stages have their places: what does not fit now is the number of micro-batches.
  constexpr std::string_view kKeys =
      "; training.local_batch_size says how large they are, in `tessera gradients` "
      "pipeline.micro_batches how many";
  return {std::string(row.name),
          named(kKeys, [&] { return pipeline::make_schedule(*kind, shape); }),
          {}};
}

std::string findings_text(const pipeline::Validation& validation) {
  constexpr std::size_t kMost = 3;
  std::string text;
  for (const auto& finding : validation.findings) {
    if (&finding - validation.findings.data() == kMost) break;
    text += concat(text.empty() ? "" : "; ", to_string(finding.fault), ": ", finding.text);
  }
  const auto all = std::ssize(validation.findings) + validation.more;
  const auto more = all - std::min<std::int64_t>(all, kMost);
  return more == 0 ? text : concat(text, "; and ", more, " more");
}

/// Its slots, and its messages where it has some. Moves of parameters follow from the slots.
NamedSchedule schedule_of_file(const PipelineConfig& asked, int ranks, std::int64_t micro_batches) {
  const std::string& file = asked.schedule_file;
  constexpr std::string_view kKey = "pipeline.schedule_file";
  const std::string text = open_as(kKey, [&] { return read_text_file(file, kMostScheduleBytes); });
  pipeline::Program program = pipeline::parse_csv(text, concat(kKey, ": ", shown(file)));
  const auto rows = static_cast<int>(program.steps.size());
  TESSERA_CHECK(rows == ranks, ErrorKind::kConfig, kKey, ": found a schedule of ", rows,
                " ranks in ", shown(file), ", expected one of ", ranks,
                ", parallelism.pipeline_parallel_degree; change either");
  TESSERA_CHECK(program.micro_batches == micro_batches, ErrorKind::kConfig, kKey,
                ": found a schedule of ", program.micro_batches, " micro-batches in ", shown(file),
                ", expected one of ", micro_batches,
                ", which a step has; take another file, or change the batch sizes");
  const auto stages = static_cast<std::int64_t>(program.rank_of.size());
  TESSERA_CHECK(!asked.stages_per_rank || std::int64_t{*asked.stages_per_rank} * ranks == stages,
                ErrorKind::kConfig, "pipeline.stages_per_rank: found ",
                asked.stages_per_rank.value_or(0), ", expected what makes ", stages, " stages on ",
                ranks, " ranks, as in ", shown(file), "; leave it out");
  pipeline::Schedule schedule = schedule_of(program);
  const bool has_own = pipeline::has_messages(program);
  const auto validation = has_own ? validate(program) : validate(schedule);
  TESSERA_CHECK(validation.valid(), ErrorKind::kConfig, kKey, ": found ", shown(file),
                ", which is no valid schedule (", findings_text(validation),
                "), expected one; `tessera schedule FILE` names all that is wrong");
  NamedSchedule found{file, std::move(schedule), validation.remarks};
  if (has_own) found.own_messages = with_moves(program);
  return found;
}

pipeline::Split split_of(const std::vector<std::int64_t>& asked, const pipeline::LayerCosts& costs,
                         const pipeline::Schedule& schedule) {
  if (asked.empty()) return pipeline::split_by_cost(costs, schedule.rank_of);
  std::vector<int> first_layers;
  for (const std::int64_t layer : asked) first_layers.push_back(static_cast<int>(layer));
  return pipeline::split_as_given(first_layers, static_cast<int>(costs.layers.size()),
                                  schedule.stages());
}

std::string_view reshard_text(PipelineReshard reshard) {
  return reshard == PipelineReshard::kStep ? "stages gathered once a step"
                                           : "units gathered for each micro-batch";
}

}  // namespace

pipeline::LayerCosts layer_costs(const models::ModelSpec& spec,
                                 const models::ModelDescription& model, std::int64_t row_tokens) {
  pipeline::LayerCosts costs;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    costs.layers.push_back(attention_cost(spec, layer, row_tokens));
  }
  for (const models::ParameterSpec& row : model.parameters) {
    const auto products = 2.0 * static_cast<double>(models::active_numel(spec, row));
    (row.layer ? costs.layers.at(static_cast<std::size_t>(*row.layer)) : costs.after) += products;
  }
  return costs;
}

std::optional<PipelinePlan> resolve_pipeline(const Config& config, const ParallelDims& dims,
                                             const models::ModelSpec& spec,
                                             const models::ModelDescription& model,
                                             const PipelineBatch& batch) {
  if (dims.pp == 1 && !has_schedule(config)) return std::nullopt;
  const PipelineConfig& asked = config.pipeline;
  NamedSchedule found = asked.schedule_file.empty()
                            ? schedule_of_kind(asked, dims.pp, batch.micro_batches)
                            : schedule_of_file(asked, dims.pp, batch.micro_batches);
  const pipeline::LayerCosts costs = layer_costs(spec, model, batch.row_tokens);
  PipelinePlan plan;
  plan.name = std::move(found.name);
  plan.schedule = std::move(found.schedule);
  plan.own_messages = std::move(found.own_messages);
  for (int rank = 0; rank < plan.schedule.ranks(); ++rank) {
    const auto stages = std::ssize(plan.schedule.stages_of(rank));
    TESSERA_CHECK(
        stages <= StepScopeOptions::kMostStages, ErrorKind::kConfig,
        asked.schedule_file.empty() ? "pipeline.stages_per_rank" : "pipeline.schedule_file",
        ": found ", stages, " stages on rank ", rank, ", expected at most ",
        StepScopeOptions::kMostStages);
  }
  plan.split = split_of(asked.split, costs, plan.schedule);
  plan.costs = stage_costs(plan.split, costs);
  plan.reshard =
      asked.reshard.value_or(dims.pp == 1 ? PipelineReshard::kMicroBatch : PipelineReshard::kStep);
  plan.overlap = asked.overlap;
  plan.remarks = std::move(found.remarks);
  return plan;
}

std::string to_string(const PipelinePlan& plan) {
  const pipeline::Schedule& schedule = plan.schedule;
  std::string text = concat("pipeline ", printable(plan.name), ": ", schedule.ranks(), " ranks, ",
                            schedule.stages(), " stages, ", schedule.micro_batches,
                            " micro-batches, ", reshard_text(plan.reshard), "\n");
  double all = 0.0;
  for (const double cost : plan.costs) all += cost;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const double cost = plan.costs.at(static_cast<std::size_t>(stage));
    std::ostringstream numbers;
    numbers << std::setprecision(4) << cost / 1e6 << " MFLOP a token, " << std::fixed
            << std::setprecision(1) << (all > 0.0 ? 100.0 * cost / all : 0.0) << " %";
    text +=
        concat("  stage ", stage, " on rank ", schedule.rank_of.at(static_cast<std::size_t>(stage)),
               ": ", layers_text(plan.split, stage), "; forward ", numbers.str(), "\n");
  }
  return text;
}

std::uint64_t hash(const PipelinePlan& plan) {
  return Hasher()
      .add(std::string_view("pipeline 3"))
      .add(std::int64_t{plan.schedule.micro_batches})
      .add(std::string_view(to_string(plan.schedule)))
      .add(std::string_view(plan.own_messages ? to_csv(*plan.own_messages) : ""))
      .add(std::string_view(to_string(plan.split)))
      .add(reshard_text(plan.reshard))
      .add(word_of(plan.overlap))
      .digest();
}

pipeline::Costs stage_costs(const PipelinePlan& plan, const Config& config, int sharing,
                            double of_operation) {
  const auto tokens = static_cast<double>(config.training.local_batch_size.value_or(1) *
                                          config.training.seq_len.value());
  const RecomputeMode mode = config.activation_checkpoint.of_layers();
  const double again = mode == RecomputeMode::kFull        ? 1.0
                       : mode == RecomputeMode::kSelective ? capture::kSelectiveShare
                                                           : 0.0;
  pipeline::Costs costs;
  for (const double per_token : plan.costs) {
    const double forward = per_token * tokens / sharing * of_operation;
    costs.push_back({.forward = forward,
                     .input_gradient = (1.0 + again) * forward,
                     .weight_gradient = forward});
  }
  return costs;
}

models::StageLayers stage_layers(const PipelinePlan& plan, int stage) {
  return {.embedding = stage == 0,
          .layers = {plan.split.begin(stage), plan.split.end(stage)},
          .head = stage + 1 == plan.split.stages()};
}

models::StagesOfRank stages_of_rank(const PipelinePlan& plan, int pp_rank) {
  models::StagesOfRank stages;
  for (const int stage : plan.schedule.stages_of(pp_rank)) {
    stages.push_back(stage_layers(plan, stage));
  }
  return stages;
}

void note_copies(const PipelinePlan& plan, const models::ModelDescription& model,
                 ModelContract& contract) {
  const std::vector<int>& ranks = plan.schedule.rank_of;
  if (ranks.front() == ranks.back()) return;
  for (const auto& parameter : model.parameters) {
    if (parameter.tied_to.empty()) continue;
    const auto owner =
        std::ranges::find(contract.parameters, parameter.tied_to, &GradContract::name);
    TESSERA_INVARIANT(owner != contract.parameters.end(), parameter.tied_to, " has no contract");
    owner->reductions.copies = {std::min(ranks.front(), ranks.back()),
                                std::max(ranks.front(), ranks.back())};
  }
}

}  // namespace tessera::train
