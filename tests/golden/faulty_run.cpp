#include "golden/faulty_run.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>

#include "dist/ranks.h"
#include "golden/model_folder.h"
#include "nn/placed_module.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "train/data.h"
#include "train/step.h"

namespace tessera::golden {
namespace {

using torch::autograd::variable_list;

class RawGradientHook : public torch::autograd::FunctionPreHook {
 public:
  explicit RawGradientHook(std::function<at::Tensor(const at::Tensor&)> change)
      : change_(std::move(change)) {}
  variable_list operator()(const variable_list& grads) override { return {change_(grads.at(0))}; }

 private:
  std::function<at::Tensor(const at::Tensor&)> change_;
};

/// The model of one rank, sharded, after its step.
class RankOfStep {
 public:
  RankOfStep(const std::string& folder, const Degrees& degrees, const Changes& changes,
             World& world)
      : changes_(changes), config_(config_for(folder, degrees)) {
    if (changes.config) changes.config(config_);
    source_ = train::open_model(config_.model);
    dims_ = train::resolve_parallelism(config_.parallelism, world.size());
    mesh_.emplace(world.mesh(train::mesh_shape(dims_)));
    batch_ = train::open_gradients_batch(Reference::of(folder).batches(),
                                         train::vocabulary_of(source_.spec, false), std::nullopt);
  }

  /// The same on every rank.
  Step run() {
    Step step;
    auto parts = train::model_parts(source_, config_, *mesh_);
    std::vector<std::function<void()>> after_sharding;
    const RankParts rank{*mesh_, parts, after_sharding};
    if (changes_.parts) changes_.parts(rank);
    const auto stand_in = changes_.transitions ? changes_.transitions(rank) : nullptr;
    std::shared_ptr<Sharded<models::LanguageModel>> model;
    try {
      model = train::parallelize(parts, source_, config_, *mesh_);
    } catch (const Error& error) {
      step.refusal = error.what();
      return step;
    }
    for (const auto& act : after_sharding) act();
    {
      std::optional<parallel::StandInScope> scope;
      if (stand_in) scope.emplace(*stand_in);
      step.loss = backward(*model);
    }
    step.not_invariant = check_invariant_gradients(*model);
    step.norm = changes_.norm ? changes_.norm(*model) : gradient_norm(*model);
    model->visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      step.gradients[name] = gradient.clone();
    });
    return step;
  }

 private:
  double backward(Sharded<models::LanguageModel>& model) const {
    const int data_rank =
        mesh_->coordinate(axis::kReplicate) * dims_.dp_shard + mesh_->coordinate(axis::kShard);
    const auto rows = train::micro_batches(batch_->rows_in_step(), batch_->rows_in_step(),
                                           dims_.data_ranks(), data_rank);
    const auto options = train::step_options(config_, nullptr);
    return train::forward_backward(model, *batch_, 1, rows, options).mean();
  }

  const Changes& changes_;
  train::Config config_;
  train::ModelSource source_;
  train::ParallelDims dims_;
  std::optional<Mesh> mesh_;
  std::unique_ptr<train::BatchSource> batch_;
};

/// Of modules whose names end so: itself and its parameters' names in the model.
template <class F>
void for_modules(const RankParts& rank, std::string_view ending, F&& act) {
  int met = 0;
  for (const auto& entry : rank.parts.model->named_modules()) {
    if (!entry.key().ends_with(ending)) continue;
    ++met;
    act(entry.key(), *entry.value());
  }
  TESSERA_INVARIANT(met > 0, "no module ends in ", std::string(ending));
}

}  // namespace

Step run_step(const std::string& folder, const Degrees& degrees, const Changes& changes) {
  Step step;
  test::ranks(degrees.ranks()).run([&](World& world) {
    at::set_num_threads(1);  // how many there are must not decide how sums are split
    Step mine = RankOfStep(folder, degrees, changes, world).run();
    if (world.rank() == 0) step = std::move(mine);
  });
  return step;
}

void declare(const RankParts& rank, std::string_view ending, const ParameterLayout& layout) {
  for_modules(rank, ending, [&](const std::string&, torch::nn::Module& module) {
    dynamic_cast<nn::PlacedModule&>(module).declare_all(layout);
  });
}

void contract(const RankParts& rank, std::string_view ending, const ParameterLayout& layout) {
  const DataAxes data(rank.mesh.shapes(), 1.0);
  for_modules(rank, ending, [&](const std::string& name, const torch::nn::Module& module) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      for (GradContract& each : rank.parts.contract.parameters) {
        if (each.name != name + "." + parameter.key()) continue;
        each.layout = layout;
        each.reductions = reductions_of(layout, data, each.name);
      }
    }
  });
}

void place(const RankParts& rank, std::string_view ending, const ParameterLayout& layout) {
  declare(rank, ending, layout);
  contract(rank, ending, layout);
}

void on_raw_gradient(const RankParts& rank, std::string_view ending,
                     const std::function<at::Tensor(const at::Tensor&)>& change) {
  for (const auto& parameter : rank.parts.model->named_parameters()) {
    if (!parameter.key().ends_with(ending)) continue;
    // In front of the library's own, which takes the gradient away.
    rank.after_sharding.emplace_back([tensor = parameter.value(), change] {
      auto& hooks = torch::autograd::impl::hooks(tensor);
      hooks.insert(hooks.begin(), std::make_unique<RawGradientHook>(change));
    });
  }
}

}  // namespace tessera::golden
