#include "golden/faulty_run.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>

#include "base/test_hooks.h"
#include "golden/model_folder.h"
#include "models/expert_bias.h"
#include "nn/parameter.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "train/data/data.h"
#include "train/expert_balance.h"
#include "train/step.h"

namespace tessera::golden {
namespace {

using torch::autograd::variable_list;

class RawGradientHook : public torch::autograd::FunctionPreHook {
 public:
  RawGradientHook(const RankParts& rank, std::function<at::Tensor(const at::Tensor&)> change)
      : rank_(rank), change_(std::move(change)) {}
  variable_list operator()(const variable_list& grads) override {
    const at::Tensor changed = change_(grads.at(0));
    if (!changed.is_same(grads.at(0))) rank_.act();
    return {changed};
  }

 private:
  RankParts rank_;
  std::function<at::Tensor(const at::Tensor&)> change_;
};

/// Another source's batches, changed.
class ChangedBatches : public train::BatchSource {
 public:
  ChangedBatches(std::unique_ptr<train::BatchSource> source,
                 std::function<void(train::MicroBatch&)> change)
      : source_(std::move(source)), change_(std::move(change)) {}
  std::int64_t rows_in_step() const override { return source_->rows_in_step(); }
  std::int64_t row_tokens() const override { return source_->row_tokens(); }
  train::MicroBatch load(std::int64_t step, train::RowRange rows) const override {
    auto batch = source_->load(step, rows);
    change_(batch);
    return batch;
  }
  std::int64_t rows_in_pass() const override { return source_->rows_in_pass(); }
  void check_labels(std::int64_t steps) override { source_->check_labels(steps); }
  std::vector<std::string> opened_from() const override { return source_->opened_from(); }

 private:
  std::unique_ptr<train::BatchSource> source_;
  std::function<void(train::MicroBatch&)> change_;
};

/// A place of this thread, where there is a function for it.
template <class Place>
class MaySet {
 public:
  MaySet(Place& place, const typename Place::Function& function) {
    if (function) set_.emplace(place, function);
  }

 private:
  std::optional<test_hooks::Set<Place>> set_;
};

/// The micro-batches of a rank's thread are changed while it lives.
thread_local const ContextStandIn* context_here = nullptr;

class ContextHere {
 public:
  explicit ContextHere(const ContextStandIn& context)
      : rows_(test_hooks::context_rows, context.rows),
        mask_(test_hooks::context_mask, context.mask),
        exchange_(test_hooks::context_exchange, context.exchange) {
    context_here = &context;
  }
  ~ContextHere() { context_here = nullptr; }
  ContextHere(const ContextHere&) = delete;
  ContextHere& operator=(const ContextHere&) = delete;

 private:
  MaySet<decltype(test_hooks::context_rows)> rows_;
  MaySet<decltype(test_hooks::context_mask)> mask_;
  MaySet<decltype(test_hooks::context_exchange)> exchange_;
};

void change_batch(const Mesh& /*mesh*/, const train::MicroBatch& batch) {
  if (context_here != nullptr && context_here->batch) context_here->batch(batch);
}

/// The model of one rank, sharded, after its step.
class RankOfStep {
 public:
  RankOfStep(const std::string& folder, const Degrees& degrees, const Changes& changes,
             std::atomic<int>& acted, World& world)
      : changes_(changes), acted_(acted), config_(config_for(folder, degrees)) {
    if (changes.config) changes.config(config_);
    source_ = train::open_model(config_.model);
    if (changes.spec) {
      changes.spec(source_.spec);
      ++acted_;
    }
    dims_ = train::resolve_parallelism(config_.parallelism, world.size());
    mesh_.emplace(world.mesh(train::mesh_shape(dims_)));
    batch_ = train::open_gradients_batch(Reference::of(folder).batches(),
                                         train::vocabulary_of(source_.spec, false), std::nullopt);
    if (changes.batch) {
      batch_ = std::make_unique<ChangedBatches>(std::move(batch_), changes.batch);
    }
  }

  /// The same on every rank.
  Step run() {
    Step step;
    auto parts = train::model_parts(source_, config_, *mesh_);
    std::vector<std::function<void()>> after_sharding;
    const RankParts rank{*mesh_, parts, after_sharding, acted_};
    if (changes_.parts) changes_.parts(rank);
    std::shared_ptr<Sharded<models::LanguageModel>> model;
    try {
      model = train::parallelize(parts, source_, config_, *mesh_);
    } catch (const Error& error) {
      step.refusal = error.what();
      return step;
    }
    for (const auto& act : after_sharding) act();
    train::BatchLoss loss;
    try {
      loss = forward_backward(rank, *model);
    } catch (const Error& error) {
      step.forward_refusal = error.what();
      return step;
    }
    step.loss = loss.mean();
    step.auxiliary = loss.auxiliary;
    step.not_invariant = check_invariant_gradients(*model);
    step.norm = changes_.norm ? changes_.norm(rank, *model) : gradient_norm(*model);
    step.biases = {balanced(*model, loss)};
    model->visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      step.gradients[name] = gradient.clone();
    });
    return step;
  }

 private:
  train::BatchLoss forward_backward(const RankParts& rank,
                                    Sharded<models::LanguageModel>& model) const {
    const auto transitions = changes_.transitions ? changes_.transitions(rank) : nullptr;
    const auto sums = changes_.sums ? changes_.sums(rank) : nullptr;
    std::optional<test_hooks::Set<decltype(test_hooks::transition_forward)>> forward;
    std::optional<test_hooks::Set<decltype(test_hooks::transition_backward)>> backward;
    std::optional<test_hooks::Set<decltype(test_hooks::rank_sum)>> sum;
    if (transitions && transitions->forward) {
      forward.emplace(test_hooks::transition_forward, transitions->forward);
    }
    if (transitions && transitions->backward) {
      backward.emplace(test_hooks::transition_backward, transitions->backward);
    }
    if (sums) sum.emplace(test_hooks::rank_sum, sums->way);
    const auto context = changes_.context ? changes_.context(rank) : ContextStandIn();
    const ContextHere here(context);
    std::optional<test_hooks::Set<decltype(test_hooks::starts_of_state)>> starts;
    if (changes_.starts) {
      starts.emplace(test_hooks::starts_of_state,
                     [&](nn::StatePart part, const at::Tensor& of_rows) {
                       const at::Tensor changed = changes_.starts(part, of_rows);
                       if (!changed.is_same(of_rows)) rank.act();
                       return changed;
                     });
    }
    const int data_rank =
        mesh_->coordinate(axis::kReplicate) * dims_.dp_shard + mesh_->coordinate(axis::kShard);
    const auto all = batch_->rows_in_step();
    const auto rows = train::micro_batches(all, config_.training.local_batch_size.value_or(all),
                                           dims_.data_ranks(), data_rank);
    return train::forward_backward(model, *batch_, 1, rows, train::step_options(config_, nullptr));
  }

  Tensors balanced(const ShardedBase& model, const train::BatchLoss& loss) const {
    Tensors biases;
    if (config_.model.load_balance_coeff == 0) return biases;
    train::balance_experts(model, source_, loss.chosen, config_.model.load_balance_coeff);
    for (const BufferView& view : model.buffers()) {
      const std::string& name = view.contract->name;
      if (models::HasExpertBias::is_name(name)) biases[name] = view.tensor.clone();
    }
    return biases;
  }

  const Changes& changes_;
  std::atomic<int>& acted_;
  train::Config config_;
  train::ModelSource source_;
  ParallelDims dims_;
  std::optional<Mesh> mesh_;
  std::unique_ptr<train::BatchSource> batch_;
};

/// Opens what only layers say of themselves.
struct Declared : nn::PlacedModule {
  static constexpr auto kSay = &Declared::declare;
};

/// Calls `act` for every parameter whose name, or whose module's name, ends so: with its module and
/// its name there.
template <class F>
void for_parameters(const RankParts& rank, std::string_view ending, F&& act) {
  int met = 0;
  for (const auto& entry : rank.parts.model->named_modules()) {
    for (const auto& parameter : entry.value()->named_parameters(/*recurse=*/false)) {
      const std::string name = entry.key() + "." + parameter.key();
      if (!entry.key().ends_with(ending) && !name.ends_with(ending)) continue;
      ++met;
      act(entry.key(), *entry.value(), parameter.key());
    }
  }
  TESSERA_INVARIANT(met > 0, "no parameter and no module ends in ", std::string(ending));
}

}  // namespace

Step run_step(const std::string& folder, const Degrees& degrees, const Changes& changes) {
  std::vector<Step> steps(static_cast<std::size_t>(degrees.ranks()));
  std::atomic<int> acted = 0;
  const test_hooks::Set batches(test_hooks::took_micro_batch, change_batch);
  test::ranks(degrees.ranks()).run([&](World& world) {
    at::set_num_threads(1);  // how many there are must not decide how sums are split
    steps[static_cast<std::size_t>(world.rank())] =
        RankOfStep(folder, degrees, changes, acted, world).run();
  });
  Step step = std::move(steps.front());
  for (std::size_t rank = 1; rank < steps.size(); ++rank) {
    for (auto& biases : steps[rank].biases) step.biases.push_back(std::move(biases));
  }
  step.acted = acted;
  return step;
}

void declare(const RankParts& rank, std::string_view ending, const ParameterLayout& layout) {
  for_parameters(rank, ending,
                 [&](const std::string&, torch::nn::Module& module, const std::string& parameter) {
                   auto& placed = dynamic_cast<nn::PlacedModule&>(module);
                   if (!(placed.layout_of(parameter) == layout)) rank.act();
                   (placed.*Declared::kSay)(parameter, layout);
                 });
}

void contract(const RankParts& rank, std::string_view ending, const ParameterLayout& layout) {
  const DataAxes data(rank.mesh.shapes(), 1.0);
  on_contracts(rank, ending, [&](GradContract& each) {
    each.layout = layout;
    each.reductions = reductions_of(layout, data, each.name);
  });
}

void on_contracts(const RankParts& rank, std::string_view ending,
                  const std::function<void(GradContract&)>& change) {
  for_parameters(rank, ending,
                 [&](const std::string& module, torch::nn::Module&, const std::string& parameter) {
                   for (GradContract& each : rank.parts.contract.parameters) {
                     if (each.name != module + "." + parameter) continue;
                     const GradContract before = each;
                     change(each);
                     if (!(each == before)) rank.act();
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
    rank.after_sharding.emplace_back([rank, tensor = parameter.value(), change] {
      auto& hooks = torch::autograd::impl::hooks(tensor);
      hooks.insert(hooks.begin(), std::make_unique<RawGradientHook>(rank, change));
    });
  }
}

}  // namespace tessera::golden
