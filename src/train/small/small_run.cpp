#include "train/small/small_run.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "base/test_hooks.h"
#include "base/text/alike.h"
#include "comm/group.h"
#include "comm/thread_ranks.h"
#include "fsdp/call_watch.h"
#include "fsdp/optim/optimizer_registry.h"
#include "models/adapters.h"
#include "models/expert_bias.h"
#include "parallel/transition.h"
#include "parallel/transition_watch.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "train/config/config_resolve.h"
#include "train/expert_balance.h"
#include "train/gradients.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/pipeline/pipeline_step.h"
#include "train/small/small_spec.h"
#include "train/step.h"

namespace tessera::train {
namespace {

constexpr std::int64_t kIgnored = -100;

check::Values values_of(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto* const begin = wide.const_data_ptr<double>();
  return {tensor.sizes().vec(), std::vector<double>(begin, begin + wide.numel())};
}

/// The rows of a run, drawn or of a batch. Where fewer data ranks run the rows of `data_ranks`,
/// each of their micro-batches has the rows of the same one of those.
class RowsOfRun final : public BatchSource {
 public:
  explicit RowsOfRun(const SmallRun& run)
      : batch_(run.batch),
        data_ranks_(run.data_ranks),
        micro_batches_(run.micro_batches),
        runs_on_(run.dims.data_ranks()),
        vocabulary_(run.source.spec.vocab_size) {}

  std::int64_t rows_in_step() const override { return data_ranks_ * micro_batches_; }
  std::int64_t row_tokens() const override {
    return batch_ ? batch_->row_tokens() : kSmallPositions;
  }
  MicroBatch load(std::int64_t step, RowRange rows) const override {
    if (batch_ && rows.size() == 0) return batch_->load(1, {0, 0});
    std::vector<MicroBatch> each;
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const std::int64_t row = row_at(i);
      each.push_back(batch_ ? batch_->load(1, {row, row + 1}) : drawn(step, row));
    }
    return together(each);
  }
  std::int64_t rows_in_pass() const override { return rows_in_step(); }
  void check_labels(std::int64_t /*steps*/) override {}
  std::vector<std::string> opened_from() const override { return {}; }

 private:
  /// The row of the layout that `index` stands for in this one.
  std::int64_t row_at(std::int64_t index) const {
    const std::int64_t each = data_ranks_ / runs_on_;  // rows of a micro-batch here
    const std::int64_t of_rank = each * micro_batches_;
    const std::int64_t rank = index / of_rank, place = index % of_rank;
    const std::int64_t micro_batch = place / each;
    return (rank * each + place % each) * micro_batches_ + micro_batch;
  }
  /// About a fifth of the labels does not count.
  MicroBatch drawn(std::int64_t step, std::int64_t row) const {
    const at::Tensor ids = at::empty({1, row_tokens()}, at::kLong);
    const at::Tensor targets = at::empty_like(ids);
    std::mt19937 random(static_cast<std::uint32_t>(step * 1000 + row));
    const auto token = [&] {  // the last id may stand for an image
      return static_cast<std::int64_t>(3 + random() % static_cast<std::uint64_t>(vocabulary_ - 4));
    };
    for (std::int64_t t = 0; t < row_tokens(); ++t) {
      ids[0][t] = token();
      targets[0][t] = random() % 5 == 0 ? kIgnored : token();
    }
    return {.input_ids = ids, .targets = targets};
  }
  static MicroBatch together(const std::vector<MicroBatch>& each) {
    const auto joined = [&](auto&& tensor_of) {
      std::vector<at::Tensor> parts;
      for (const MicroBatch& one : each) parts.push_back(tensor_of(one));
      return at::cat(parts, 0);
    };
    MicroBatch all = each.front();
    all.input_ids = joined([](const MicroBatch& one) { return one.input_ids; });
    all.targets = joined([](const MicroBatch& one) { return one.targets; });
    if (all.token_types) {
      all.token_types = joined([](const MicroBatch& one) { return *one.token_types; });
    }
    if (all.images) {
      all.images =
          models::Images{joined([](const MicroBatch& one) { return one.images->pixel_values; }),
                         joined([](const MicroBatch& one) { return one.images->position_ids; })};
    }
    return all;
  }

  const std::shared_ptr<const BatchSource> batch_;
  const std::int64_t data_ranks_, micro_batches_, runs_on_, vocabulary_;
};

/// Notes what crosses the borders of units and transitions on this thread.
class Notes final : public fsdp::CallWatch, public parallel::TransitionWatch {
 public:
  explicit Notes(SeenRank& seen) : seen_(seen) {}

  void entered(const std::string& unit, const std::vector<at::Tensor*>& inputs) override {
    const std::size_t place = seen_.units.size();
    units_.push_back(place);
    seen_.units.push_back({.unit = unit, .call = calls_[unit]++});
    const at::Tensor* input = first_floating(inputs);
    if (input == nullptr) return;
    seen_.units[place].input = values_of(*input);
    note_gradient(*input, place, &SeenUnit::input_gradient);
  }
  void left(const std::string& /*unit*/, const std::vector<at::Tensor*>& results) override {
    const std::size_t place = units_.back();
    units_.pop_back();
    const at::Tensor* result = first_floating(results);
    if (result == nullptr) return;
    seen_.units[place].result = values_of(*result);
    note_gradient(*result, place, &SeenUnit::gradient);
  }
  void saw(const parallel::Transition& of, parallel::Direction direction, const at::Tensor& given,
           const at::Tensor& made) override {
    if (!given.is_floating_point()) return;  // numbers of rows
    const auto form = of.form();
    seen_.transitions.push_back({.kind = std::string(of.kind),
                                 .where = of.where,
                                 .unit = units_.empty() ? "" : seen_.units[units_.back()].unit,
                                 .is_forward = direction == parallel::Direction::kForward,
                                 .group = of.axis.group->name(),
                                 .axis = of.axis.name,
                                 .ranks = of.axis.size,
                                 .rank = of.axis.rank,
                                 .dim = form.dim,
                                 .total = form.total,
                                 .is_invariant = form.is_invariant,
                                 .sends = form.splits.sends,
                                 .receives = form.splits.receives,
                                 .given = values_of(given),
                                 .made = values_of(made)});
  }

 private:
  static const at::Tensor* first_floating(const std::vector<at::Tensor*>& tensors) {
    const auto first = std::ranges::find_if(
        tensors, [](const at::Tensor* one) { return one->defined() && one->is_floating_point(); });
    return first == tensors.end() ? nullptr : *first;
  }
  void note_gradient(const at::Tensor& of, std::size_t place, check::Values SeenUnit::* to) {
    if (!of.requires_grad()) return;
    of.register_hook([this, place, to](const at::Tensor& gradient) {
      if (gradient.defined()) seen_.units[place].*to = values_of(gradient);
    });
  }

  SeenRank& seen_;
  std::vector<std::size_t> units_;  // whose forward is under way
  std::map<std::string, std::int64_t> calls_;
};

class SmallRank {
 public:
  SmallRank(const SmallRun& run, World& world)
      : run_(run), mesh_(world.mesh(mesh_shape(run.dims))), batches_(run) {
    const auto plan =
        resolve_pipeline(run.config, run.dims, run.source.spec, run.source.description,
                         {run.micro_batches, batches_.row_tokens()});
    auto parts =
        model_parts(run.source, run.config, mesh_, Purpose::kTraining, plan ? &*plan : nullptr);
    const ModelContract contract = parts.contract;
    model_ = parallelize(std::move(parts), run.source, run.config, mesh_);
    if (plan) {
      pipeline_.emplace(*plan, stream_borders(*plan, run.dims, run.source.description, contract),
                        *model_);
    }
    optimizer_ = fsdp::make_optimizer(fsdp::OptimizerName::kSgd, *model_, 0.1, {}, {});
  }

  /// `step` is of all ranks; each fills its own part, rank 0 the numbers that all have alike.
  void run(std::int64_t number, SeenStep& step) {
    const int rank = mesh_.world()->rank();
    SeenRank& seen = step.ranks[static_cast<std::size_t>(rank)];
    const BatchLoss loss = compute(number, seen);
    seen.not_invariant = check_invariant_gradients(*model_);
    const double norm = gradient_norm(*model_);
    balance(loss, seen);
    visit_full_gradients_of_run(*model_, [&](const std::string& name, const at::Tensor& gradient) {
      if (rank == 0) step.gradients.emplace(name, values_of(gradient));
    });
    if (rank == 0) {
      step.loss = loss.mean();
      step.auxiliary = loss.auxiliary;
      step.norm = norm;
      step.kept = loss.kept;
    }
    optimizer_->step();
    model_->zero_grad();
  }

 private:
  BatchLoss compute(std::int64_t number, SeenRank& seen) {
    Notes notes(seen);
    const fsdp::CallWatchScope units(notes);
    const parallel::TransitionWatchScope transitions(notes);
    auto options = step_options(run_.config, nullptr);
    options.pipeline = pipeline_ ? &*pipeline_ : nullptr;
    const auto rows = micro_batches(batches_.rows_in_step(), *run_.config.training.local_batch_size,
                                    run_.dims.data_ranks(), data_rank(mesh_));
    return forward_backward(*model_, batches_, number, rows, options);
  }
  void balance(const BatchLoss& loss, SeenRank& seen) const {
    const double coefficient = run_.config.model.load_balance_coeff;
    if (coefficient == 0) return;
    balance_experts(*model_, run_.source, loss.chosen, coefficient);
    for (const BufferView& view : model_->buffers()) {
      const std::string& name = view.contract->name;
      if (models::HasExpertBias::is_name(name)) seen.biases.emplace(name, values_of(view.tensor));
    }
  }

  const SmallRun& run_;
  Mesh mesh_;
  const RowsOfRun batches_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::optional<PipelineOfRun> pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
};

/// Patterns that name something in the small model, too.
std::vector<std::string> that_match(const std::vector<std::string>& patterns,
                                    const models::ModelDescription& model) {
  std::vector<std::string> kept;
  for (const std::string& pattern : patterns) {
    const bool matches = std::ranges::any_of(
        model.parameters, [&](const auto& one) { return matches_name(pattern, one.name); });
    if (matches) kept.push_back(pattern);
  }
  return kept;
}

/// "model.layers.*.mlp": the name of a layer without its number.
std::string without_number(const std::string& layer) {
  const auto numbered = layer_name(layer);
  return numbered ? concat(numbered->before, '*', numbered->after) : layer;
}

/// Asks for adapters of the same layers, by the names of the small model. They are narrow, as its
/// matrices are, and drop nothing: what is dropped follows from a row's place, which differs by
/// layout.
LoraRequest small_lora(const ModelSource& full, const models::ModelSpec& small) {
  if (!full.lora) return {};
  constexpr std::int64_t kMostRank = 4;
  std::set<std::string> adapted;
  for (const std::string& layer : full.lora.layers) adapted.insert(without_number(layer));
  LoraRequest request{.rank = std::min(full.lora.rank, kMostRank)};
  request.alpha = full.lora.scale() * static_cast<double>(request.rank);
  for (const std::string& layer : models::adaptable_layers(small)) {
    if (adapted.contains(without_number(layer))) request.targets.push_back(layer);
  }
  return request;
}

/// All in float32; what is frozen by a rule stays so.
PrecisionConfig all_wide(const PrecisionConfig& precision, const models::ModelDescription& model) {
  PrecisionConfig wide;
  wide.param_dtype.dtype = DType::kFloat32;
  for (const PrecisionRule& rule : precision.rule) {
    if (!rule.frozen) continue;
    PrecisionRule kept;
    kept.match = that_match(rule.match, model);
    kept.frozen = rule.frozen;
    if (!kept.match.empty()) wide.rule.push_back(std::move(kept));
  }
  return wide;
}

/// Makes the configuration that every layout of the small run has.
Config small_config(const Config& config, const ModelSource& small) {
  Config of = config;
  of.device = DeviceName::kCpu;
  of.model.path.clear();
  of.model.config = "the small model";
  if (of.model.freeze) of.model.freeze = that_match(*of.model.freeze, small.description);
  // A coefficient as small as trainers have it would hide what is wrong with the loss.
  if (aux_loss_coef(of.model.aux_loss_coef, small.spec) > 0.0) of.model.aux_loss_coef = 0.5;
  of.precision = all_wide(config.precision, small.description);
  of.compile = {};
  of.pipeline.split.clear();
  of.pipeline.micro_batches = -1;
  if (!of.pipeline.schedule_file.empty()) {
    of.pipeline.schedule_file.clear();
    of.pipeline.schedule = "1F1B";
    of.pipeline.stages_per_rank.reset();
  }
  of.grad_scaler = {};
  of.optimizer = {};
  of.training.seq_len = kSmallPositions;
  of.training.max_norm = 0.0;
  of.debug = {};
  return of;
}

void set_degrees(Config& config, const ParallelDims& dims) {
  auto& to = config.parallelism;
  to.data_parallel_replicate_degree = dims.dp_replicate;
  to.data_parallel_shard_degree = dims.dp_shard;
  to.tensor_parallel_degree = dims.tp;
  to.expert_parallel_degree = dims.ep;
  to.expert_tensor_parallel_degree = dims.etp;
  to.pipeline_parallel_degree = dims.pp;
  to.context_parallel_degree = dims.cp;
  to.context_parallel_form = dims.context_form;
  to.context_parallel_parts = dims.context_parts;
}

/// The error of a rank that found it by itself: others only see that one has stopped.
std::string cause_of(const std::vector<std::string>& errors, const std::string& first) {
  for (const std::string& error : errors) {
    if (!error.empty() && error.find("an exception left") == std::string::npos) return error;
  }
  return first;
}

}  // namespace

SmallRun small_run(const Config& config, const ModelSource& source, const ParallelDims& dims) {
  SmallRun run;
  run.dims = small_degrees(source.spec, dims);
  // As many stages as any kind of schedule has on two ranks.
  const std::int64_t stages =
      run.dims.pp == 1 ? 2
                       : std::int64_t{run.dims.pp} * config.pipeline.stages_per_rank.value_or(2);
  run.source.spec = small_spec(source.spec, dims, stages);
  run.source.lora = models::plan_lora(run.source.spec, small_lora(source, run.source.spec));
  run.source.description = models::describe(run.source.spec, run.source.lora);
  models::check_degrees(run.source.spec, run.dims);
  run.config = small_config(config, run.source);
  run.data_ranks = run.dims.data_ranks();
  run.micro_batches = run.dims.pp > 1 ? 2 * stages : 2;
  return under(run, run.dims);
}

SmallRun run_of_batch(const Config& config, const ModelSource& source, const ParallelDims& dims,
                      std::shared_ptr<const BatchSource> batch, std::int64_t data_ranks) {
  const std::int64_t rows = batch->rows_in_step();
  TESSERA_CHECK(rows % data_ranks == 0, ErrorKind::kUsage, "--batch: found ", rows,
                " rows, expected a multiple of ", data_ranks, ", the data ranks of the layouts");
  SmallRun run{.config = config,
               .source = source,
               .dims = dims,
               .data_ranks = data_ranks,
               .micro_batches = rows / data_ranks,
               .batch = std::move(batch)};
  run.config.device = DeviceName::kCpu;
  run.config.compile = {};
  run.config.grad_scaler = {};
  run.config.optimizer = {};
  run.config.pipeline.micro_batches = -1;
  run.config.training.seq_len = run.batch->row_tokens();
  run.config.debug.guard = 0;
  return under(run, dims);
}

SmallRun in_float32(const SmallRun& run) {
  SmallRun wide = run;
  wide.config.precision = all_wide(run.config.precision, run.source.description);
  return wide;
}

SmallRun under(const SmallRun& run, const ParallelDims& dims) {
  SmallRun other = run;
  other.dims = dims;
  set_degrees(other.config, dims);
  auto& training = other.config.training;
  training.local_batch_size = run.data_ranks / dims.data_ranks();
  training.global_batch_size = run.data_ranks * run.micro_batches;
  return other;
}

SeenRun run_small(const SmallRun& run) {
  const int ranks = run.dims.world_size();
  SeenRun seen;
  seen.steps.resize(run.batch ? 1 : 2);
  for (SeenStep& step : seen.steps) step.ranks.resize(static_cast<std::size_t>(ranks));
  WorldOptions options;
  // A whole model computes for long before a rank comes to what another one waits in.
  options.timeout = run.batch ? std::chrono::minutes(10) : std::chrono::seconds(20);
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  try {
    comm::ThreadRanks threads(ranks, ThreadBackend::kInProcess, options);
    threads.run([&](World& world) {
      at::set_num_threads(1);
      try {
        SmallRank rank(run, world);
        for (std::size_t step = 0; step < seen.steps.size(); ++step) {
          rank.run(static_cast<std::int64_t>(step) + 1, seen.steps[step]);
        }
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(world.rank())] = error.what();
        throw;
      }
    });
  } catch (const std::exception& error) {
    seen.refused = cause_of(errors, error.what());
  }
  return seen;
}

}  // namespace tessera::train
