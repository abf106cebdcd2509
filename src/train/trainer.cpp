#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include "base/log.h"
#include "base/text/printable.h"
#include "base/threads/exchange_times.h"
#include "capture/replay/regions.h"
#include "comm/device.h"
#include "comm/group.h"
#include "fsdp/handle.h"
#include "fsdp/optim/pending_norm.h"
#include "kernels/cpu/tables.h"
#include "moe/routing.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "train/batch_memory.h"
#include "train/config/config_resolve.h"
#include "train/data/data.h"
#include "train/data/data_files.h"
#include "train/expert_balance.h"
#include "train/hf/model_forms.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_step.h"
#include "train/planned_steps.h"
#include "train/report/banner.h"
#include "train/report/checks.h"
#include "train/report/device_limits.h"
#include "train/report/guard.h"
#include "train/report/metrics.h"
#include "train/report/observers.h"
#include "train/report/progress.h"
#include "train/report/replayed_calls.h"
#include "train/resume/checkpoint_session.h"
#include "train/step.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

/// The peak of this program: getrusage() would begin with what the launcher's process had at fork.
double peak_rss_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    double kib = 0;
    if (name == "VmHWM:" && status >> kib) return kib / 1024.0;
  }
  throw Error(ErrorKind::kIo, "/proc/self/status: found no VmHWM, expected the peak of memory");
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

/// Which of the step's rows this data rank computes.
class Rows {
 public:
  Rows(const Config& config, const BatchSource& source, const Mesh& mesh)
      : rows_(source.rows_in_step()),
        local_(config.training.local_batch_size.value_or(1)),
        ranks_(mesh.size_of(axis::kReplicate) * mesh.size_of(axis::kShard)),
        rank_(data_rank(mesh)) {}
  std::vector<RowRange> ranges() const { return micro_batches(rows_, local_, ranks_, rank_); }
  std::int64_t count() const { return rows_; }
  /// The most of any rank.
  RowsOfRank most(std::int64_t row_tokens, int shared_by) const {
    const auto rows = layout::part_of(rows_, ranks_, 0).size();
    return {rows, std::min(rows, local_), row_tokens, shared_by};
  }

 private:
  std::int64_t rows_;
  std::int64_t local_;
  int ranks_;
  int rank_;
};

/// A device has logits in its own memory.
Room room_of(c10::Device device) {
  const double host = memory_bytes();
  if (device.is_cpu()) return {host, host};
  const auto size = comm::memory_size(device);
  return {host, size ? static_cast<double>(*size) : host, size ? device.str() : Room().computes_on};
}

class Trainer {
 public:
  Trainer(const Config& given, World& world, const TrainingHooks& hooks)
      : config_(with_context_parts(with_files(given))),
        hooks_(hooks),
        world_(world),
        source_(
            open_as(model_key(given.model), [&] { return open_model(given.model, given.lora); })),
        dims_(resolve_parallelism(config_.parallelism, world.size())),
        mesh_(world.mesh(mesh_shape(dims_))),
        device_(comm::facts_of(world.device())) {
    const Config& config = config_;
    TESSERA_CHECK(!source_.adapters, ErrorKind::kConfig, "model.path: found ", config.model.path,
                  ", a checkpoint of adapters, expected a whole model; resume the adapters' run, "
                  "or make one with convert --merged");
    checkpoints_.emplace(config, mesh_);
    config_.training.global_batch_size = checkpoints_->global_batch_size(dims_.data_ranks());
    open_data();
    check_positions(config.parallelism, data_->row_tokens());
    models::check_learned_positions(source_.spec, data_->row_tokens());
    const auto plan = resolve_pipeline(
        config_, dims_, source_.spec, source_.description,
        {resolve_micro_batches(config_, Verb::kTrain, data_->rows_in_step(), dims_.data_ranks()),
         data_->row_tokens()});
    require_room(Rows(config_, *data_, mesh_).most(data_->row_tokens(), dims_.cp),
                 source_.spec.vocab_size / dims_.tp, room_of(world.device()));
    if (validation_) {
      open_as("validation.path", [&] {
        check_positions(config.parallelism, validation_->row_tokens(), "validation.path");
        models::check_learned_positions(source_.spec, validation_->row_tokens());
      });
    }
    check_labels();
    checkpoints_->begin(source_, *data_);
    auto parts = model_parts(source_, config, mesh_, Purpose::kTraining, plan ? &*plan : nullptr);
    if (!config.contract.lock.empty()) {
      const auto says = world.rank() == 0 ? SaysDifferences::kYes : SaysDifferences::kNo;
      comm::on_all_or_none(world, "contract.lock",
                           [&] { require_locked(config, parts.contract, says); });
    }
    parameters_ = parts.contract.parameters;
    require_16_bits(parameters_, device_.name, device_.capability);
    std::optional<StreamBorders> borders;
    if (plan) borders = stream_borders(*plan, dims_, source_.description, parts.contract);
    // Not before what a key alone may be refused for; reading the weights may take minutes.
    if (config.job.dump_folder && world.rank() == 0) {
      log::info(banner_line("run folder", *config.job.dump_folder));
    }
    auto planned = options_of_plan(parts.contract);
    model_ =
        parallelize(std::move(parts), source_, config, mesh_,
                    checkpoints_->resumes() ? InitialWeights::kLater : InitialWeights::kOfSource);
    if (plan) {
      pipeline_.emplace(*plan, *borders, *model_);
      for (const std::string& remark : plan->remarks) {
        if (world.rank() == 0) log::warn(remark);
      }
    }
    const bool replays = config.compile.mode == CompileChoice::kReplay;
    if (plan && replays) capture::replay_regions(*model_);
    if (replays) replayed_.emplace(*model_);
    optimizer_ = fsdp::make_optimizer(
        config.optimizer.name, *model_, *config.optimizer.lr, config.optimizer,
        hidden_matrices(source_.description.parameters, checkpoints_->fused_as_one(source_)));
    if (planned.mode != CompileMode::kOff) {
      planned_.emplace(std::move(planned), *model_, world, config.metrics.folder);
    }
    scaler_ = make_scaler(*model_, parameters_, config.grad_scaler);
    const auto done = checkpoints_->load(*model_, *optimizer_, scaler_.get());
    done_ = done.step;
    left_out_ = done.left_out;
    if (done_ > 0 && world.rank() == 0) before_ = config_before(config_);
    flops_per_token_ = flops_per_token(model_size(), data_->row_tokens());
    if (world.rank() == 0) {
      metrics_.emplace(config.metrics.folder, done_);
      steps_without_labels_ = metrics_->steps_without_labels();
    }
  }

  TrainingResult run() {
    try {
      return in_memory_of(world_, ErrorKind::kConfig, "outside of forwards and backwards",
                          [&] { return run_to_the_end(); });
    } catch (const std::exception& error) {
      // Unwinding waits for this rank's checkpoint writer, the others would wait for both.
      if (hooks_.on_failure) hooks_.on_failure(error);
      throw;
    }
  }

 private:
  void open_data() {
    BatchRequest request;
    request.path = config_.data.path;
    request.sources = config_.data.source;
    request.packing = config_.data.packing;
    request.training = config_.training;
    request.data_ranks = dims_.data_ranks();
    request.seed = static_cast<std::uint64_t>(config_.debug.seed);
    request.vocabulary = vocabulary_of_model();
    request.steps = *config_.training.steps;
    data_ = open_batches(request);
    require_same_at_all(*data_, config_.data.source.empty() ? "data.path" : kSourceKey, world_);
    if (config_.validation.path.empty()) return;
    request.path = config_.validation.path;
    request.sources.clear();
    request.key = "validation.path";
    request.steps = 1;
    request.packing_is_a_must = false;  // the key is that of what is trained on
    if (data_kind(request.path, request.key) == DataKind::kBatches) {
      request.training.seq_len.reset();  // its rows are its own, however long those of training are
      request.training.global_batch_size = -1;
      request.packing.reset();
    }
    validation_ = open_batches(request);
    require_same_at_all(*validation_, request.key, world_);
  }

  /// By one rank for all: it may write an index.
  void check_labels() {
    comm::on_all_or_none(world_, "labels of the data", [&] {
      if (world_.rank() != 0) return;
      world_.work_at("looking for labels in the data");
      open_as(config_.data.source.empty() ? "data.path" : kSourceKey,
              [&] { data_->check_labels(*config_.training.steps); });
      if (validation_) {
        open_as("validation.path", [&] { validation_->check_labels(validation_batches()); });
      }
      world_.work_at("");
    });
  }

  /// Steps of the validation's data that hold each of its rows once.
  std::int64_t batches_of_pass() const {
    return (validation_->rows_in_pass() - 1) / validation_->rows_in_step() + 1;
  }
  std::int64_t validation_batches() const {
    const std::int64_t asked = config_.validation.steps;
    return asked == -1 ? batches_of_pass() : std::min(asked, batches_of_pass());
  }

  TrainingResult run_to_the_end() {
    observers_.emplace(config_, world_, done_ + 1, hooks_.profiling);
    if (config_.debug.check_dtypes && done_ < *config_.training.steps) {
      const Rows rows(config_, *data_, mesh_);
      check_dtypes(*model_, [&] {
        run_once(*model_, *data_, done_ + 1, rows.ranges().front(), pipeline());
      });
    }
    if (hooks_.on_first_step) hooks_.on_first_step(done_);
    if (world_.rank() == 0 && done_ < *config_.training.steps) introduce();
    TrainingResult result;
    result.steps = done_;
    try {
      run_steps(result);
    } catch (const Error& error) {
      // All ranks are here, and the checkpoint under way is the last good one.
      if (error.kind() == ErrorKind::kNumeric) finish_after_failure();
      throw;
    }
    checkpoints_->finish();
    observers_->finish();
    return result;
  }

  void introduce() const {
    RunFacts run;
    run.parameters = parameters_;
    if (source_.spec.moe) run.active = model_size().active_parameters;
    run.dims = dims_;
    run.rows = data_->rows_in_step();
    run.row_tokens = data_->row_tokens();
    run.rows_at_once = config_.training.local_batch_size.value_or(1);
    run.first_step = done_ + 1;
    run.steps = *config_.training.steps;
    run.processor = {kernels::cpu::best_isa().name, kernels::cpu::has_bf16_products(),
                     at::get_num_threads()};
    if (!world_.device().is_cpu()) {
      run.device = world_.device().str();
      if (!device_.name.empty()) run.device += concat(" (", device_.name, ")");
      if (world_.size() > 1) run.device += concat(" over ", world_.backend());
      if (hooks_.rank_count == RankCount::kByDefault) run.devices_for_ranks = comm::cuda_devices();
    }
    const auto warn = [](const std::optional<std::string>& text) {
      if (text) log::warn(*text);
    };
    warn(slow_bf16(run.parameters, run.processor));
    warn(long_rows(run.row_tokens, source_.spec.max_position_embeddings, config_.model));
    for (const std::string& remark : short_run(config_)) log::warn(remark);
    warn(unused_optimizer_keys(config_.optimizer));
    if (before_) warn(changed_lr(*before_, config_, done_, left_out_));
    // One configuration may serve with plans and without.
    if (const auto text = unused_compile_keys(config_.compile)) log::info(*text);
    for (const std::string& line : banner(run)) log::info(line);
    for (const std::string& line : data_->as_text()) log::info(line);
    if (validation_) {
      for (const std::string& line : validation_->as_text()) log::info("validation: ", line);
    }
    if (validation_ && config_.validation.steps > batches_of_pass()) {
      log::warn("validation.steps: found ", config_.validation.steps, ", but ",
                shown(config_.validation.path[0]), " has ", validation_->rows_in_pass(),
                " rows, which are ", batches_of_pass(),
                " batches: each is read once; -1 says the same of any data");
    }
  }

  /// The error that ended the run stays its error.
  void finish_after_failure() {
    try {
      checkpoints_->finish();
    } catch (const std::exception& second) {
      if (world_.rank() == 0) log::error(second.what());
    }
  }

  /// The values that ranks exchange at the end of a step.
  struct StepEnd {
    StepMetrics metrics;
    bool stop = false;           ///< some rank was asked to stop
    bool anyone_writes = false;  ///< some rank's checkpoint writer has work left
  };

  void run_steps(TrainingResult& result) {
    const auto steps = *config_.training.steps;
    bool stop = max_over_ranks(*model_, {asked_to_stop()}).front() > 0;
    if (result.steps >= steps) {
      log::info("step ", result.steps, " is done already and training.steps is ", steps,
                ": nothing is left to do; raise training.steps to continue");
      return;
    }
    // The memory that loading took in addition to the weights is not counted as a step's.
    if (!world_.device().is_cpu()) comm::begin_memory_peaks(world_.device());
    if (validation_ && result.steps == 0 && !stop) stop = !validate_before_first(result);
    while (!stop && result.steps < steps) {
      const auto step = result.steps + 1;
      observers_->begin_step(step);
      auto [metrics, asked, anyone_writes] = train_step(step);
      observers_->end_step(step);
      stop = asked;
      if (validation_ && !stop && (step % config_.validation.interval == 0 || step == steps)) {
        metrics.val_loss = validate_now();
        stop = !metrics.val_loss;
        if (!stop) result.last_val_loss = metrics.val_loss;
      }
      result.steps = step;
      if (!std::isnan(metrics.loss)) result.last_loss = metrics.loss;
      if (metrics_) report(metrics, steps);
      observers_->report(metrics);
      if (hooks_.after_step) hooks_.after_step(metrics, *model_);
      checkpoints_->after_step({step, left_out_}, stop || step == steps, anyone_writes, *model_,
                               *optimizer_, scaler_.get());
    }
    if (stop) log::info("asked to stop: ended after step ", result.steps, " of ", steps);
    if (replayed_) log::info(replayed_->as_text());
  }

  /// False where some rank was asked to stop meanwhile.
  bool validate_before_first(TrainingResult& result) {
    StepMetrics metrics;
    metrics.val_loss = validate_now();
    if (!metrics.val_loss) return false;
    result.last_val_loss = metrics.val_loss;
    if (metrics_) report(metrics, *config_.training.steps);
    observers_->report(metrics);
    return true;
  }

  PipelineOfRun* pipeline() { return pipeline_ ? &*pipeline_ : nullptr; }

  double asked_to_stop() const {
    return hooks_.stop_requested && hooks_.stop_requested() ? 1.0 : 0.0;
  }

  Vocabulary vocabulary_of_model() const { return vocabulary_of(source_.spec, !source_.folder); }

  /// The part of a plan that is known before the model: the run's ranks, rows and memory.
  CompileOptions options_of_plan(const ModelContract& contract) {
    // The steps of a pipeline have the plan of its schedule.
    if (config_.compile.mode == CompileChoice::kOff || has_schedule(config_)) return {};
    const auto of_rank = Rows(config_, *data_, mesh_).ranges().size();
    return planned_options(config_, source_, dims_, contract, static_cast<std::int64_t>(of_rank),
                           world_);
  }

  StepEnd train_step(std::int64_t step) {
    const auto begin = Clock::now();
    const Rows rows(config_, *data_, mesh_);
    auto options = step_options(config_, scaler_.get());
    options.pipeline = pipeline();
    if (planned_) planned_->begin_step();
    const auto exchanged = base::exchange_times();
    const auto pending = launch_forward_backward(*model_, *data_, step, rows.ranges(), options);
    const bool runs = pending.kept() > 0;
    if (runs && config_.debug.check_placements) check_placements(*model_);
    StepMetrics metrics;
    metrics.step = step;
    metrics.lr = learning_rate(config_.lr_scheduler, *config_.optimizer.lr, *config_.training.steps,
                               step - left_out_);
    if (replayed_) metrics.regions = replayed_->of_step();
    if (runs) {
      try {
        clip_and_update(pending, metrics);  // makes what the optimizer keeps
      } catch (const std::exception& error) {
        rethrow_with_key(*model_, *data_, rows.ranges(), error);
      }
      if (config_.debug.guard > 0 && step % config_.debug.guard == 0) {
        compare_replicas(*model_, *optimizer_, *data_, rows.ranges(), step);
      }
      model_->zero_grad();
    } else {
      leave_out(metrics);
    }
    if (!updated_) ++left_out_;
    if (steps_without_labels_ > 0) metrics.steps_without_labels = steps_without_labels_;
    const std::chrono::duration<double, std::milli> elapsed = Clock::now() - begin;
    if (planned_ && runs) planned_->end_step(step);
    if (planned_ && !runs) planned_->leave_out_step();
    add_exchanges(exchanged, metrics);
    std::vector<double> mine{elapsed.count(), peak_rss_mib(), asked_to_stop(),
                             checkpoints_->writing() ? 1.0 : 0.0};
    const bool on_device = !world_.device().is_cpu();
    if (on_device) {
      const auto memory = comm::memory_of(world_.device());
      mine.push_back(mib(memory.reserved));
      mine.push_back(mib(memory.peak));
    }
    const auto most = max_over_ranks(*model_, mine);
    metrics.step_ms = most[0];
    metrics.peak_rss_mib = most[1];
    if (on_device) {
      metrics.peak_device_mib = most.back();
      metrics.peak_device_reserved_mib = most[most.size() - 2];
    }
    // A step that is left out computes nothing, so it has no speed.
    add_speed(runs ? static_cast<double>(rows.count() * data_->row_tokens()) : NAN, metrics);
    return {metrics, most[2] > 0, most[3] > 0};
  }

  /// Adds what exchanges have taken since `before`.
  static void add_exchanges(const base::ExchangeTimes& before, StepMetrics& metrics) {
    const auto of_step = base::exchange_times() - before;
    if (of_step.in_flight == 0) return;
    metrics.exchange_ms = of_step.in_flight;
    metrics.exchange_hidden_ms = of_step.hidden();
  }

  void add_speed(double tokens, StepMetrics& metrics) const {
    metrics.tps_global = tokens / (metrics.step_ms / 1000.0);
    metrics.tps = metrics.tps_global / world_.size();
    metrics.tflops = metrics.tps * flops_per_token_ / 1e12;
    if (world_.device().is_cpu()) return;
    metrics.mfu = metrics.tflops * 1e12 / peak_flops(device_.name).value_or(NAN);
  }

  /// From gradients and numbers that may still be under way to new parameters.
  void clip_and_update(const PendingLoss& pending, StepMetrics& metrics) {
    auto numbers = pending.numbers();
    // The one time in a step that the host waits for its device.
    metrics.grad_norm = fsdp::clip_and_read(*model_, config_.training.max_norm, numbers);
    const auto loss = pending.added(*model_, numbers);
    metrics.loss = loss.mean();
    metrics.sources = source_metrics(loss, metrics.step);
    if (aux_loss_coef(config_.model.aux_loss_coef, source_.spec) > 0) {
      metrics.aux_loss = loss.auxiliary;
    }
    metrics.expert_loads = expert_loads(loss);
    require_finite(metrics);
    const double balance = config_.model.load_balance_coeff;
    if (balance > 0) {
      fsdp::order_after_reads(*model_);
      balance_experts(*model_, source_, loss.chosen, balance);
    }
    optimizer_->set_lr(metrics.lr);
    update(metrics);
  }

  /// A step in which no row has an unmasked target: no rank has a loss or anything to update.
  void leave_out(StepMetrics& metrics) {
    updated_ = false;
    metrics.loss = metrics.grad_norm = NAN;
    metrics.sources = source_metrics({}, metrics.step);
    ++steps_without_labels_;
    log::info("step ", metrics.step,
              ": found no unmasked target in its rows: the step is left out");
  }

  std::vector<SourceMetrics> source_metrics(const BatchLoss& loss, std::int64_t step) const {
    std::vector<SourceMetrics> sources;
    for (const double share : data_->shares(step)) sources.push_back({share, NAN});
    for (std::size_t i = 0; i < loss.of_sources.size(); ++i) {
      const auto& [sum, kept] = loss.of_sources[i];
      if (kept > 0) sources[i].loss = sum / static_cast<double>(kept);
    }
    return sources;
  }

  void update(StepMetrics& metrics) {
    updated_ = true;
    if (!scaler_) return optimizer_->step();
    metrics.loss_scale = scaler_->scale();
    updated_ = scaler_->step(*optimizer_, *model_, metrics.grad_norm);
    if (!updated_) {
      log::info("step ", metrics.step, ": gradients are not finite at the loss scale ",
                *metrics.loss_scale, ": the step is left out, the scale is ", scaler_->scale(),
                " from now on");
    }
    metrics.skipped_steps = scaler_->state().skipped_steps;
  }

  std::vector<ExpertLoad> expert_loads(const BatchLoss& loss) const {
    std::vector<ExpertLoad> loads;
    if (loss.chosen.empty()) return loads;
    const auto layers = models::routed_experts(source_.spec).layers;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const at::Tensor chosen = at::tensor(loss.chosen.at(i), at::kDouble);
      loads.push_back({layers[i], moe::load_max_over_mean(chosen)});
    }
    return loads;
  }

  ModelSize model_size() const {
    ModelSize size;
    for (const auto& parameter : source_.description.parameters) {
      if (models::is_adapter(parameter.name)) continue;  // as of the whole model without
      size.active_parameters += models::active_numel(source_.spec, parameter);
    }
    size.layers = source_.spec.num_hidden_layers;
    size.heads = source_.spec.num_attention_heads;
    size.head_dim = source_.spec.attended_dims() / 2;
    return size;
  }

  /// Loss and norm are sums over all ranks: every rank comes to the same answer.
  void require_finite(const StepMetrics& metrics) {
    // A scaler leaves out a step whose norm is not finite, and says when that goes too far.
    if (std::isfinite(metrics.loss) && (scaler_ || std::isfinite(metrics.grad_norm))) return;
    TESSERA_CHECK(false, ErrorKind::kNumeric, "step ", metrics.step, ": found loss ", metrics.loss,
                  " and gradient norm ", metrics.grad_norm,
                  ", expected finite values; first parameters concerned: ",
                  joined(nonfinite_parameters(*model_, 3), "none"),
                  "; lower optimizer.lr, or look at the data of this step");
  }

  /// None where some rank was asked to stop meanwhile: it may be many batches.
  std::optional<double> validate_now() {
    BatchLoss total;
    const Rows rows(config_, *validation_, mesh_);
    for (std::int64_t step = 1; step <= validation_batches(); ++step) {
      // The last one may have less, but as many micro-batches.
      const auto left = validation_->rows_in_pass() - (step - 1) * rows.count();
      auto ranges = rows.ranges();
      for (auto& [first, last] : ranges) {
        first = std::min(first, left);
        last = std::min(last, left);
      }
      const auto loss = forward_only(*model_, *validation_, step, ranges, pipeline());
      total.sum += loss.sum;
      total.kept += loss.kept;
      if (max_over_ranks(*model_, {asked_to_stop()}).front() > 0) return std::nullopt;
    }
    return total.mean();
  }

  void report(const StepMetrics& metrics, std::int64_t steps) {
    metrics_->append(metrics);
    const bool due = metrics.step % config_.metrics.log_freq == 0 || metrics.step == steps;
    if (!due && !metrics.val_loss) return;
    step_lines_.print(to_step_line(metrics));
  }

  Config config_;
  const TrainingHooks& hooks_;
  World& world_;
  ModelSource source_;
  ParallelDims dims_;
  Mesh mesh_;
  comm::DeviceFacts device_;
  std::unique_ptr<BatchSource> data_;
  std::unique_ptr<BatchSource> validation_;
  std::shared_ptr<Sharded<models::LanguageModel>> model_;
  std::vector<GradContract> parameters_;   ///< of the whole model
  std::optional<PipelineOfRun> pipeline_;  ///< none where the model is here whole
  std::optional<ReplayedCalls> replayed_;  ///< none but with "replay"
  std::unique_ptr<Optimizer> optimizer_;
  std::optional<PlannedSteps> planned_;  ///< none with compile.mode = "off"
  std::unique_ptr<GradScaler> scaler_;   ///< none without float16
  std::optional<CheckpointSession> checkpoints_;
  std::int64_t done_ = 0;         ///< steps before this run
  std::optional<Config> before_;  ///< of the run that did them, on rank 0
  bool updated_ = false;          ///< by the step under way: a scaler may leave that out
  std::int64_t left_out_ = 0;     ///< steps without an update so far: the schedule waits for them
  double flops_per_token_ = 0;
  std::int64_t steps_without_labels_ = 0;  ///< so far; before this run only rank 0 knows
  std::optional<MetricsFile> metrics_;
  std::optional<Observers> observers_;
  StepLines step_lines_;
};

}  // namespace

TrainingResult run_training(const Config& config, World& world, const TrainingHooks& hooks) {
  // Not kConfig: nothing was found wrong, and the exit code is that of memory that runs out later.
  const auto trainer = in_memory_of(world, ErrorKind::kInternal, "before the first step", [&] {
    return std::make_unique<Trainer>(config, world, hooks);
  });
  return trainer->run();
}

}  // namespace tessera::train
