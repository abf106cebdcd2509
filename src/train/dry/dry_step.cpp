#include "train/dry/dry_step.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "comm/dry_world.h"
#include "dry/fake_operations.h"
#include "dry/memory_count.h"
#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/optim/pending_norm.h"
#include "models/language_model.h"
#include "tessera/compile.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "train/config/config_resolve.h"
#include "train/dry/dry_batches.h"
#include "train/hf/model_forms.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/pipeline/pipeline_step.h"
#include "train/planned_steps.h"
#include "train/step.h"

namespace tessera::train {
namespace {

/// Rows as short as all layouts divide, where nothing says how long they are.
std::int64_t positions_of(const Config& config, const ParallelDims& dims) {
  if (config.training.seq_len) return *config.training.seq_len;
  if (dims.cp == 1 && dims.context_parts == 1) return 2 * dims.tp;
  return 2 * std::lcm(std::int64_t{dims.context_parts}, std::int64_t{dims.cp} * dims.tp);
}

/// Numbers of tokens and of their experts are no fake tensors: they are computed.
void require_countable(const Config& config, const ModelSource& source, const ParallelDims& dims) {
  constexpr std::int64_t kMost = std::int64_t{1} << 25;
  const std::int64_t positions = positions_of(config, dims);
  const auto batch = resolve_batch(config.training, dims.data_ranks());
  const std::int64_t choices = source.spec.moe ? source.spec.moe->experts_per_token : 1;
  // Each is below 2^46, and rows of a step are as many times the micro-batch's.
  const std::int64_t most_rows = kMost / positions;
  TESSERA_CHECK(
      batch.local <= most_rows / choices && batch.local * batch.micro_batches <= most_rows,
      ErrorKind::kConfig, "training.local_batch_size and global_batch_size: found ", batch.local,
      " rows of ", positions, " tokens at once, of ", choices,
      choices == 1 ? " choice" : " choices of experts", " each, and ", batch.micro_batches,
      " times as many in a step of a rank, expected at most ", kMost,
      " choices at once and tokens in a step: memory and bytes of more are not counted");
  constexpr std::int64_t kMostMicroBatches = 1024;  // some minutes
  TESSERA_CHECK(batch.micro_batches <= kMostMicroBatches, ErrorKind::kConfig,
                "training.global_batch_size: found ", batch.micro_batches,
                " micro-batches in a step of a rank, expected at most ", kMostMicroBatches,
                ": each is gone through, and more of them take no other memory");
}

class DryRank {
 public:
  DryRank(const Config& config, const ModelSource& source, World& world)
      : config_(config),
        dims_(resolve_parallelism(config.parallelism, world.size())),
        mesh_(world.mesh(mesh_shape(dims_))),
        batches_(config, source, resolve_batch(config.training, dims_.data_ranks()).global,
                 positions_of(config, dims_)) {
    const auto plan = resolve_pipeline(
        config_, dims_, source.spec, source.description,
        {resolve_micro_batches(config_, Verb::kTrain, batches_.rows_in_step(), dims_.data_ranks()),
         config_.training.seq_len.value_or(0)});
    auto parts = model_parts(source, config_, mesh_, Purpose::kTraining, plan ? &*plan : nullptr);
    const auto parameters = parts.contract.parameters;
    std::optional<StreamBorders> borders;
    if (plan) borders = stream_borders(*plan, dims_, source.description, parts.contract);
    const CompileOptions planned =
        plan ? CompileOptions() : options_of_plan(source, parts.contract, world);
    model_ = parallelize(std::move(parts), source, config_, mesh_, InitialWeights::kNone);
    if (plan) pipeline_.emplace(*plan, *borders, *model_);
    if (planned.mode != CompileMode::kOff) compile(*model_, planned);
    optimizer_ =
        fsdp::make_optimizer(config_.optimizer.name, *model_, config_.optimizer.lr.value_or(1e-3),
                             config_.optimizer, forms_of(source));
    scaler_ = make_scaler(*model_, parameters, config_.grad_scaler);
  }

  /// Until its gradients are read.
  void compute(std::int64_t step) {
    auto options = step_options(config_, scaler_.get());
    options.pipeline = pipeline_ ? &*pipeline_ : nullptr;
    const auto pending = launch_forward_backward(*model_, batches_, step, rows(), options);
    auto numbers = pending.numbers();
    norm_ = fsdp::clip_and_read(*model_, config_.training.max_norm, numbers);
    pending.added(*model_, numbers);
  }
  void update() {
    if (scaler_) {
      scaler_->step(*optimizer_, *model_, norm_);
    } else {
      optimizer_->step();
    }
  }
  void end() { model_->zero_grad(); }

  std::int64_t num_micro_batches() const { return std::ssize(rows()); }

  const Sharded<models::LanguageModel>& model() const { return *model_; }
  const Optimizer& optimizer() const { return *optimizer_; }

 private:
  fsdp::MatrixForms forms_of(const ModelSource& source) const {
    const auto& table = source.description.parameters;
    return hidden_matrices(table, fused_as_one(table, config_.optimizer.rule));
  }
  /// The plan of a run's second step. Nothing is recorded to be replayed.
  CompileOptions options_of_plan(const ModelSource& source, const ModelContract& contract,
                                 World& world) const {
    auto options = planned_options(config_, source, dims_, contract, std::ssize(rows()), world);
    if (options.mode == CompileMode::kReplay) options.mode = CompileMode::kPlan;
    return options;
  }
  std::vector<RowRange> rows() const {
    return micro_batches(batches_.rows_in_step(), config_.training.local_batch_size.value_or(1),
                         dims_.data_ranks(), data_rank(mesh_));
  }

  const Config config_;
  const ParallelDims dims_;
  Mesh mesh_;
  const DryBatches batches_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::optional<PipelineOfRun> pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<GradScaler> scaler_;
  double norm_ = 0;
};

}  // namespace

moe::ChoiceScope::Choose choice_by(const ExpertLoads& loads, const models::RoutedExperts& of) {
  require_fit(loads, of, "loads of experts");
  TESSERA_INVARIANT(!loads.are_even(), "a choice by no loads");
  // The last choice that was dealt: layers that share a list see as many tokens each.
  struct Dealt {
    std::size_t list = 0;
    std::vector<std::int64_t> chosen = {};
  };
  return [loads, layers = of.layers, dealt = Dealt()](const moe::ChoiceScope::Asked& asked,
                                                      const at::Tensor& chosen) mutable {
    const auto layer = std::ranges::find(layers, asked.layer);
    TESSERA_INVARIANT(layer != layers.end(), "layer ", asked.layer, " has no experts");
    const std::size_t list =
        loads.layers.size() == 1 ? 0 : static_cast<std::size_t>(layer - layers.begin());
    const auto count = static_cast<std::size_t>(chosen.numel());
    if (dealt.list != list || dealt.chosen.size() != count) {
      dealt = {list, std::vector<std::int64_t>(count)};
      deal_experts(loads.layers[list], chosen.size(1), dealt.chosen);
    }
    chosen.copy_(at::from_blob(dealt.chosen.data(), chosen.sizes(), at::kLong));
  };
}

DryStep dry_step(const Config& config, const ModelSource& source, int rank, int ranks,
                 const DryOptions& options) {
  require_countable(config, source, resolve_parallelism(config.parallelism, ranks));
  std::optional<moe::ChoiceScope> choice;
  if (!options.loads.are_even()) {
    choice.emplace(choice_by(options.loads, models::routed_experts(source.spec)));
  }
  DryStep found{.has_loads = !options.loads.are_even()};
  const KernelsOf kernels = computes_on(config);
  const auto world =
      comm::dry_world(rank, ranks,
                      {.collective = [&](const auto& one) { found.collectives.push_back(one); },
                       .message = [&](const auto& one) { found.messages.push_back(one); }},
                      kernels);
  const dry::FakeScope no_values(kernels);
  dry::MemoryCount count;
  DryRank run(config, source, *world);
  const auto step = [&](std::int64_t number) {
    run.compute(number);
    found.held = fsdp::held_bytes(run.model());
    run.update();
    found.optimizer = fsdp::held_bytes(run.optimizer());
    run.end();
  };
  {
    std::optional<DtypeWatch> watch;
    if (options.dtypes == WatchDtypes::kYes) watch.emplace(run.model());
    try {
      step(1);
    } catch (const Error& error) {
      if (watch) found.dtypes = watch->findings();
      if (found.dtypes.empty()) throw;
      found.failed = error.what();
      return found;
    }
    if (watch) found.dtypes = watch->findings();
  }
  found.contract = run.model().contract();
  found.collectives.clear();
  found.messages.clear();
  auto counted = capture::counted_step(run.model(), count, [&] { step(2); });
  found.held.unsharded = counted.unsharded;
  found.between_steps = counted.between_steps;
  found.peak = counted.peak;
  found.micro_batches = run.num_micro_batches();
  found.spans = std::move(counted.spans);
  found.passes = std::move(counted.passes);
  return found;
}

}  // namespace tessera::train
