#include "train/pipeline/pipeline_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/random.h"
#include "grad/torch_dtype.h"
#include "pipeline/runner.h"
#include "pipeline/valid_program.h"
#include "tessera/error.h"
#include "tessera/step_scope.h"
#include "tessera/world.h"
#include "train/expert_balance.h"

namespace tessera::train {
namespace {

using pipeline::Boundary;
using pipeline::BoundaryTensor;
using pipeline::Tensors;

/// The result that the last stage of a step gives.
enum class Wanted : std::uint8_t { kLoss, kLogits };

/// One stage of a language model.
class ModelStage : public pipeline::Stage {
 public:
  struct Place {
    int stage = 0;         ///< of the pipeline
    std::size_t here = 0;  ///< among those of this rank
    models::StageLayers layers;
    bool input_has_gradient = false;
    bool output_has_gradient = false;
  };

  ModelStage(Sharded<models::LanguageModel>& model, const Place& place,
             const StreamBorders& borders)
      : model_(model),
        place_(place),
        dtype_(borders.dtype),
        sequence_parts_(borders.sequence_parts) {}

  void begin(const StepOfStages& step, Wanted wanted) {
    step_ = &step;
    wanted_ = wanted;
    found_ = {};
    found_.auxiliary_share = 1.0 / static_cast<double>(step.batches.size());
    of_.clear();
  }
  /// Over the micro-batches so far, without the places of its layers.
  const Found& found() const { return found_; }
  const models::StageLayers& layers() const { return place_.layers; }

  Boundary input(std::int64_t micro_batch) const override {
    return border(micro_batch, place_.input_has_gradient);
  }
  Boundary output(std::int64_t micro_batch) const override {
    return border(micro_batch, place_.output_has_gradient);
  }

  Tensors forward(std::int64_t micro_batch, const Tensors& inputs) override {
    const auto i = static_cast<std::size_t>(micro_batch);
    // Forwards alone train nothing, so nothing is dropped there, as without a pipeline (step.cpp).
    std::optional<SamplePlace> training;
    if (at::GradMode::is_enabled()) {
      training = SamplePlace{step_->options.seed, step_->step, step_->rows[i].begin};
    }
    const SampleScope place(training);
    models::StageInputs stage;
    stage.batch = step_->batches[i].inputs();
    stage.stage = place_.here;
    if (wanted_ == Wanted::kLogits || !place_.layers.head) stage.batch.targets.reset();
    if (!place_.layers.embedding) {
      stage.batch.images.reset();
      stage.x = inputs.at(0);
    }
    stage.batch.router_statistics = statistics();
    auto output = model_.call(&models::LanguageModel::forward_stage, stage);
    found_.chosen.add(output.loads);
    Tensors results{output.result};
    if (sends_counts()) {
      auto& routed = of_[micro_batch];
      routed = pooled(output.loads, place_.layers.embedding ? at::Tensor() : inputs.at(1));
      if (!place_.layers.head) results.push_back(routed.counts);
    }
    if (place_.layers.head && wanted_ == Wanted::kLoss) {
      found_.losses.push_back(output.result.detach());
    }
    return results;
  }

  Roots roots(std::int64_t micro_batch, const Tensors& results, const Tensors& back) override {
    Roots roots;
    if (place_.layers.head) {
      // The mean over the whole batch is differentiated: no rank divides again.
      const at::Tensor& loss = results.at(0);
      roots.tensors.push_back(loss);
      roots.gradients.push_back(
          at::full_like(loss, step_->options.loss_scale / static_cast<double>(step_->kept)));
    }
    if (sends_counts()) add_auxiliary(micro_batch, back, roots);
    return roots;
  }

  Tensors back(std::int64_t micro_batch) override {
    if (!sends_counts()) return {};
    Tensors totals{of_.at(micro_batch).counts};
    of_.erase(micro_batch);
    return totals;
  }

 private:
  bool sends_counts() const { return step_->aux_loss_coef > 0 && wanted_ == Wanted::kLoss; }

  models::RouterStatistics statistics() const {
    if (!model_.module()->spec().moe || !at::GradMode::is_enabled()) {
      return models::RouterStatistics::kNone;
    }
    return step_->aux_loss_coef > 0 ? models::RouterStatistics::kAndProbabilities
                                    : models::RouterStatistics::kCounts;
  }

  Boundary border(std::int64_t micro_batch, bool has_gradient) const {
    const models::ModelSpec& spec = model_.module()->spec();
    const at::Tensor& ids = step_->batches[static_cast<std::size_t>(micro_batch)].input_ids;
    Boundary border;
    border.activations.push_back(
        {{ids.size(0), ids.size(1) / sequence_parts_, spec.hidden_size}, dtype_, has_gradient});
    if (sends_counts()) {
      const std::int64_t experts = models::routed_experts(spec).experts;
      border.activations.push_back({{experts}, at::kLong, /*has_gradient=*/false});
      border.back.push_back({{experts}, at::kDouble});
    }
    return border;
  }

  /// With the counts of the stages before, if there are any.
  models::RouterLoad pooled(const std::vector<models::RouterLoad>& loads,
                            const at::Tensor& before) const {
    models::RouterLoad all = pool(loads);
    if (before.defined()) {
      all.counts = all.counts.defined() ? before + all.counts : before;
    } else if (!all.counts.defined()) {
      all.counts = at::zeros({models::routed_experts(model_.module()->spec()).experts},
                             at::TensorOptions(model_.mesh().world()->device()).dtype(at::kLong));
    }
    return all;
  }

  void add_auxiliary(std::int64_t micro_batch, const Tensors& back, Roots& roots) {
    auto& routed = of_.at(micro_batch);
    // From here on `counts` are the total, which goes to the stage before.
    routed.counts = place_.layers.head ? chosen_by_all(model_, routed.counts) : back.at(0);
    if (!routed.probabilities.defined()) return;
    const at::Tensor addend = auxiliary_addend(routed.probabilities, routed.counts,
                                               model_.module()->spec().moe->experts_per_token);
    routed.probabilities = at::Tensor();
    found_.auxiliary.push_back(addend.detach());
    if (!addend.requires_grad()) return;  // all that it comes from is frozen
    roots.tensors.push_back(addend);
    roots.gradients.push_back(at::full_like(
        addend, step_->options.loss_scale * step_->aux_loss_coef * found_.auxiliary_share));
  }

  Sharded<models::LanguageModel>& model_;
  Place place_;
  at::ScalarType dtype_;
  std::int64_t sequence_parts_;
  const StepOfStages* step_ = nullptr;
  Wanted wanted_ = Wanted::kLoss;
  Found found_;
  std::map<std::int64_t, models::RouterLoad> of_;  // by micro-batch, between its F and its B or I
};

}  // namespace

StreamBorders stream_borders(const PipelinePlan& plan, const ParallelDims& dims,
                             const models::ModelDescription& model, const ModelContract& contract) {
  const auto find = [&](const std::string& name) {
    const auto found = std::ranges::find(contract.parameters, name, &GradContract::name);
    TESSERA_INVARIANT(found != contract.parameters.end(), name, " has no contract");
    return found;
  };
  StreamBorders borders;
  borders.sequence_parts = dims.cp;
  if (dims.sequence == SequenceParallel::kYes) borders.sequence_parts *= dims.tp;
  for (const auto& parameter : model.parameters) {
    if (parameter.decay != models::DecayClass::kEmbedding || !parameter.tied_to.empty()) continue;
    if (parameter.part == models::ModelPart::kVision) continue;
    borders.dtype = to_scalar_type(find(parameter.name)->compute.dtype);
    break;
  }
  for (int stage = 0; stage + 1 < plan.split.stages(); ++stage) {
    const int end = plan.split.end(stage);
    bool any = false;
    std::int64_t layers = 0;  // that have been passed
    for (const auto& parameter : model.parameters) {
      const auto layer = parameter.layer;
      if (layer) layers = std::max(layers, *layer + 1);
      if (layers > end || (!layer && layers > 0)) break;  // behind the border, or the head's
      if (parameter.tied_to.empty()) any = any || find(parameter.name)->trainable;
    }
    borders.has_gradient.push_back(any);
  }
  return borders;
}

struct PipelineOfRun::Parts {
  Sharded<models::LanguageModel>& model;
  pipeline::Runner runner;
  pipeline::ValidProgram training;
  std::map<int, pipeline::ValidProgram> evaluations = {};  ///< by their micro-batches
  std::vector<ModelStage> stages;
  std::string words;  ///< what ranks of a stage have to run alike

  /// Forwards alone: those of the schedule where it has as many micro-batches, else in waves.
  const pipeline::ValidProgram& evaluation(const pipeline::Schedule& schedule, int micro_batches) {
    const auto known = evaluations.find(micro_batches);
    if (known != evaluations.end()) return known->second;
    const auto forwards =
        micro_batches == schedule.micro_batches
            ? pipeline::forward_only(schedule)
            : pipeline::forward_schedule(schedule.rank_of, schedule.ranks(), micro_batches);
    return evaluations
        .emplace(micro_batches, pipeline::ValidProgram(forwards, pipeline::Passes::kForward))
        .first->second;
  }

  std::vector<pipeline::Stage*> begin(const StepOfStages& step, Wanted wanted) {
    std::vector<pipeline::Stage*> list;
    for (auto& stage : stages) {
      stage.begin(step, wanted);
      list.push_back(&stage);
    }
    return list;
  }
};

PipelineOfRun::PipelineOfRun(PipelinePlan plan, StreamBorders borders,
                             Sharded<models::LanguageModel>& model)
    : plan_(std::move(plan)),
      parts_(new Parts{model,
                       pipeline::Runner(pipeline::ties_of(model.mesh())),
                       plan_.own_messages ? pipeline::ValidProgram(*plan_.own_messages)
                                          : pipeline::ValidProgram(plan_.schedule),
                       {},
                       {},
                       concat(to_string(plan_), ", ", hash(plan_))}) {
  std::size_t here = 0;
  for (const int stage : plan_.schedule.stages_of(model.mesh().coordinate(axis::kPipeline))) {
    ModelStage::Place place{stage, here++, stage_layers(plan_, stage)};
    const auto at = static_cast<std::size_t>(stage);
    place.input_has_gradient = stage > 0 && borders.has_gradient[at - 1];
    place.output_has_gradient = at < borders.has_gradient.size() && borders.has_gradient[at];
    parts_->stages.emplace_back(model, place, borders);
  }
}

PipelineOfRun::~PipelineOfRun() = default;

std::vector<Found> PipelineOfRun::found() const {
  std::vector<Found> all;
  const auto routed = models::routed_experts(parts_->model.module()->spec());
  for (const auto& stage : parts_->stages) {
    Found& found = all.emplace_back(stage.found());
    for (std::size_t i = 0; i < routed.layers.size(); ++i) {
      if (stage.layers().has_layer(routed.layers[i])) found.layers.push_back(i);
    }
  }
  return all;
}

std::vector<Found> PipelineOfRun::forward_backward(const StepOfStages& step) {
  StepScopeOptions options;
  options.reshard =
      plan_.reshard == PipelineReshard::kStep ? StepReshard::kStep : StepReshard::kMicroBatch;
  options.sync_every_micro_batch = step.options.sync == Sync::kEveryMicroBatch;
  options.schedule = parts_->words;
  options.stages = static_cast<int>(parts_->stages.size());
  StepScope scope(parts_->model, options);
  parts_->runner.run(parts_->training, parts_->begin(step, Wanted::kLoss),
                     {.scope = &scope,
                      .reduce_every = options.sync_every_micro_batch,
                      .overlap = plan_.overlap != pipeline::Overlap::kOff});
  return found();
}

std::vector<Found> PipelineOfRun::forward_only(const StepOfStages& step) {
  const at::NoGradGuard no_grad;
  parts_->runner.run(parts_->evaluation(plan_.schedule, static_cast<int>(step.batches.size())),
                     parts_->begin(step, Wanted::kLoss), {});
  return found();
}

std::vector<at::Tensor> PipelineOfRun::logits(const StepOfStages& step) {
  const at::NoGradGuard no_grad;
  const auto results =
      parts_->runner.run(parts_->evaluation(plan_.schedule, static_cast<int>(step.batches.size())),
                         parts_->begin(step, Wanted::kLogits), {});
  std::vector<at::Tensor> logits;
  for (const auto& of_micro_batch : results) logits.push_back(of_micro_batch.at(0));
  return logits;
}

}  // namespace tessera::train
