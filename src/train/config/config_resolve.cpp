#include "train/config/config_resolve.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <numbers>
#include <numeric>
#include <utility>

#include "base/text/printable.h"
#include "capture/passes.h"
#include "fsdp/optim/optimizer_registry.h"
#include "grad/resolve_rules.h"
#include "layout/context_cut.h"
#include "layout/range.h"
#include "pipeline/kinds.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Checks what does not depend on the machine: whether there is such a device, its World checks.
void check_device(const Config& config) {
  TESSERA_CHECK(config.device != DeviceName::kCpu || config.comm.backend != BackendName::kNccl,
                ErrorKind::kConfig,
                "comm.backend: found nccl with device cpu, expected auto or gloo: nccl carries "
                "tensors of CUDA devices only; set another backend, or device = \"cuda\"");
}

/// Checks what does not depend on ranks, rows and layers (../pipeline/ has the rest). With one rank
/// on the axis most keys have no effect, so that one configuration serves with and without a
/// pipeline.
void check_pipeline(const PipelineConfig& section) {
  const auto kind = pipeline::find_kind(section.schedule);
  TESSERA_CHECK(kind, ErrorKind::kConfig, "pipeline.schedule: found ", printable(section.schedule),
                ", expected one of ", pipeline::kind_names());
  TESSERA_CHECK(
      section.schedule_file.empty() || kind == pipeline::find_kind(PipelineConfig().schedule),
      ErrorKind::kConfig, "pipeline.schedule and pipeline.schedule_file: found ",
      pipeline::row_of(*kind).name, " and ", printable(section.schedule_file, 1024),
      ", expected one of them; leave the other out");
}

/// Keys may be there with mode off, so that one configuration serves with and without: a run says
/// that they are without effect (unused_compile_keys()).
void check_compile(const Config& config, Verb verb) {
  const CompileConfig& section = config.compile;
  if (section.passes) capture::check_passes(*section.passes);
  if (section.mode == CompileChoice::kOff) return;
  const bool only_replays = section.mode == CompileChoice::kReplay && section.form == 3 &&
                            !section.memory_budget && !section.passes && section.plan.empty();
  const int stages = config.parallelism.pipeline_parallel_degree;
  TESSERA_CHECK(!has_schedule(config) || only_replays, ErrorKind::kConfig, "compile.mode: found ",
                section.mode == CompileChoice::kPlan ? "plan" : "replay with a plan of its own",
                " with ",
                stages > 1 ? concat("pipeline_parallel_degree ", stages)
                           : concat("pipeline.schedule ", config.pipeline.schedule),
                ", expected off, or replay without form, memory_budget, passes and plan: the steps "
                "of a pipeline have the plan of its schedule; set compile.mode = \"off\" and "
                "pipeline.reshard, or ",
                stages > 1 ? "pipeline_parallel_degree = 1" : "leave pipeline.schedule out");
  if (section.memory_budget && verb != Verb::kGradients) {  // which has its batch's
    require_seq_len(config.training,
                    "; compile.memory_budget needs it to count activations, also with data that "
                    "has its own");
  }
  TESSERA_CHECK(
      section.form != 1 || !config.training.sync_every_micro_batch, ErrorKind::kConfig,
      "compile.form: found 1 with training.sync_every_micro_batch, expected 2 or 3, which "
      "reduce with every micro-batch; set form = 2 or sync_every_micro_batch = false");
}

void check_lora(const LoraRequest& lora, const ModelConfig& model) {
  if (lora.rank == 0) {
    TESSERA_CHECK(lora == LoraRequest{}, ErrorKind::kConfig,
                  "lora: found alpha, targets or dropout with rank 0, expected a rank above 0 "
                  "with them; set lora.rank or leave them out");
    return;
  }
  check_targets(lora);
  TESSERA_CHECK(lora.alpha != 0.0, ErrorKind::kConfig,
                "lora.alpha: found 0, expected a number above 0: adapters that count for nothing "
                "get no gradient and learn nothing; default: rank");
  TESSERA_CHECK(!model.path.empty(), ErrorKind::kConfig, "lora.rank: found ", lora.rank,
                " for a model from scratch, expected 0: adapters "
                "need trained weights; set model.path");
  TESSERA_CHECK(!model.freeze, ErrorKind::kConfig, "model.freeze: found a list with lora.rank ",
                lora.rank,
                ", expected none: all of the model is frozen then; leave it out, and choose layers "
                "by lora.targets");
}

void check_model(const ModelConfig& model) {
  TESSERA_CHECK(!model.path.empty() || !model.config.empty(), ErrorKind::kConfig,
                "model.path: found nothing, expected a Hugging Face folder; or set model.config to "
                "train from scratch");
  TESSERA_CHECK(model.path.empty() || model.config.empty(), ErrorKind::kConfig,
                "model.path and model.config: found both, expected one; path loads weights, config "
                "starts from scratch");
}

void check_checkpoint(const CheckpointConfig& checkpoint) {
  TESSERA_CHECK(checkpoint.enable || checkpoint.load_step == -1, ErrorKind::kConfig,
                "checkpoint.load_step: found ", checkpoint.load_step,
                " without checkpoints, expected -1; set checkpoint.enable = true");
}

// Absolute is anywhere; relative is in RUN, and a config that leaves it most likely has the working
// folder in mind.
void require_inside_run(std::string_view key, const std::string& folder) {
  const fs::path path = fs::path(folder).lexically_normal();
  TESSERA_CHECK(path.is_absolute() || path.empty() || *path.begin() != "..", ErrorKind::kConfig,
                key, ": found ", printable(folder, 1024),
                ", which leads out of RUN (job.dump_folder), expected a folder inside it; for a "
                "folder elsewhere write an absolute path");
}

void check_schedule(const LrSchedulerConfig& schedule) {
  const bool decays_last = schedule.decay == LrDecay::kWsd;
  TESSERA_CHECK(!decays_last || schedule.decay_steps, ErrorKind::kConfig,
                "lr_scheduler.decay_steps: found nothing with decay \"wsd\", expected how many of "
                "the last steps decay; it has no default");
  TESSERA_CHECK(decays_last || !schedule.decay_steps, ErrorKind::kConfig,
                "lr_scheduler.decay_steps: found ", schedule.decay_steps.value_or(0),
                " with another decay than \"wsd\", which alone has it; leave it out, or set "
                "lr_scheduler.decay = \"wsd\"");
}

void check_sources(const DataConfig& data) {
  TESSERA_CHECK(!data.path.empty() || !data.source.empty(), ErrorKind::kConfig,
                "data.path: found nothing, expected a text file, a folder, NAME.bin or "
                "X.safetensors; or tables [[data.source]]");
  TESSERA_CHECK(data.path.empty() || data.source.empty(), ErrorKind::kConfig,
                "data.path and data.source: found both, expected one; move the path into a table "
                "[[data.source]] of its own");
  if (data.source.empty()) return;
  for (const NamedSource& source : sources_of(data)) require_no_batches(source);
  double sum = 0;
  for (const DataSource& source : data.source) sum += source.weight;
  for (std::size_t i = 0; i < data.source.size(); ++i) {
    constexpr double kLeastShare = 2e-6;  // of which a draw still has a unit
    const double weight = data.source[i].weight;
    TESSERA_CHECK(weight > 0 && std::isfinite(sum) && weight >= sum * kLeastShare,
                  ErrorKind::kConfig, kSourceKey, "[", i + 1, "].weight: found ", weight,
                  weight > 0 ? concat(" of ", sum, " in all") : std::string(),
                  ", expected a number above 0 and no less than ", kLeastShare,
                  " of all weights; leave a source out that is not to be drawn");
  }
}

void check_training(const Config& config) {
  TESSERA_CHECK(config.training.steps, ErrorKind::kConfig,
                "training.steps: found nothing, expected the number of steps; it has no default");
  TESSERA_CHECK(config.optimizer.lr, ErrorKind::kConfig,
                "optimizer.lr: found nothing, expected a learning rate; it has no default");
  check_sources(config.data);
  TESSERA_CHECK(!config.job.dump_folder || !config.job.dump_folder->empty(), ErrorKind::kConfig,
                "job.dump_folder: found an empty name, expected a folder; leave it out for a "
                "new one below outputs");
  check_schedule(config.lr_scheduler);
  check_checkpoint(config.checkpoint);
  require_inside_run("checkpoint.folder", config.checkpoint.folder);
  require_inside_run("metrics.folder", config.metrics.folder);
  const DataKind kind = data_kind(config.data);
  if (kind != DataKind::kBatches) {
    require_seq_len(config.training, "; only .safetensors data can do without");
  }
  for (const std::int64_t step : config.metrics.trace_steps) {
    TESSERA_CHECK(step <= *config.training.steps, ErrorKind::kConfig, "metrics.trace_steps: found ",
                  step, ", expected at most training.steps, ", *config.training.steps);
  }
  if (config.validation.path.empty()) return;
  const DataKind held_out = data_kind(config.validation.path, "validation.path");
  if (held_out != DataKind::kBatches) {
    require_seq_len(config.training, "; validation.path needs it");
  }
}

// The dtypes that a sum may be kept in: auto is float32, and nothing is wider than that here.
void check_precision(const PrecisionConfig& precision) {
  const DType reduce = precision.reduce_dtype.dtype.value_or(DType::kFloat32);
  const DType accumulate = precision.accumulate_dtype.dtype.value_or(DType::kFloat32);
  const auto require = [](const std::string& key, DType kept, DType on_wire) {
    const auto wider = grad::wider_accumulator(kept, on_wire);
    TESSERA_CHECK(!wider, ErrorKind::kConfig, key, ": found ", to_string(kept), ", ",
                  wider.value_or(""), "; raise accumulate_dtype or lower reduce_dtype");
  };
  require("precision.accumulate_dtype", accumulate, reduce);
  int number = 0;
  for (const PrecisionRule& rule : precision.rule) {
    ++number;
    if (!rule.reduce_dtype && !rule.accumulate_dtype) continue;
    require(concat("precision.rule[", number, "].accumulate_dtype"),
            rule.accumulate_dtype.value_or(accumulate), rule.reduce_dtype.value_or(reduce));
  }
}

void check_expert_ranks(const ParallelDims& dims) {
  TESSERA_CHECK(dims.etp == 1 || dims.etp == dims.tp, ErrorKind::kConfig,
                "parallelism.expert_tensor_parallel_degree: found ", dims.etp,
                ", expected 1 or tensor_parallel_degree = ", dims.tp);
  const std::int64_t ranks = std::int64_t{dims.dp_shard} * dims.cp * dims.tp;
  const std::int64_t taken = std::int64_t{dims.ep} * dims.etp;
  TESSERA_CHECK(ranks % taken == 0, ErrorKind::kConfig,
                "parallelism.expert_parallel_degree: found ", dims.ep, ", expected a divisor of ",
                ranks / dims.etp, " = data_parallel_shard_degree",
                dims.cp > 1 ? " x context_parallel_degree" : "",
                dims.etp > 1 ? "" : " x tensor_parallel_degree",
                ": experts are shared by ranks of one replica");
}

// Degrees are at least 1 and each fits into 31 bits; a product that does not is cut off there.
std::int64_t bounded_product(std::initializer_list<int> degrees) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t product = 1;
  for (const int degree : degrees) product = std::min(product * degree, kMost);
  return product;
}

bool ends_with(std::string_view path, std::string_view ending) { return path.ends_with(ending); }

std::string absolute_under(const fs::path& base, const std::string& folder) {
  return fs::absolute(base / folder).lexically_normal().string();
}

}  // namespace

void validate(const Config& config, Verb verb) {
  check_device(config);
  check_pipeline(config.pipeline);
  check_compile(config, verb);
  validate(config.grad_scaler);
  check_model(config.model);
  check_lora(config.lora, config.model);
  check_precision(config.precision);
  if (verb == Verb::kTrain) check_training(config);
}

std::string_view model_key(const ModelConfig& model) {
  return model.path.empty() ? "model.config" : "model.path";
}

int context_parts(const ParallelismConfig& parallelism) {
  constexpr int kMost = std::numeric_limits<int>::max() / 2;
  const int cp = std::min(parallelism.context_parallel_degree, kMost);
  return parallelism.context_parallel_parts.value_or(cp == 1 ? 1 : 2 * cp);
}

int parts_of_packed_rows(int cp, std::int64_t positions) {
  constexpr int kMostOfRank = 8;  // balances any documents within a few percent
  if (cp == 1) return 1;
  for (int of_rank = kMostOfRank; of_rank > 2; of_rank -= 2) {
    const std::int64_t parts = std::int64_t{of_rank} * cp;
    if (positions % parts == 0) return static_cast<int>(parts);
  }
  return 2 * cp;
}

ParallelDims resolve_parallelism(const ParallelismConfig& parallelism, int world_size) {
  ParallelDims dims;
  dims.pp = parallelism.pipeline_parallel_degree;
  dims.dp_replicate = parallelism.data_parallel_replicate_degree;
  dims.tp = parallelism.tensor_parallel_degree;
  dims.ep = parallelism.expert_parallel_degree;
  dims.etp = parallelism.expert_tensor_parallel_degree;
  dims.cp = parallelism.context_parallel_degree;
  dims.context_form = parallelism.context_parallel_form;
  dims.context_parts = context_parts(parallelism);
  dims.sequence = parallelism.sequence_parallel ? SequenceParallel::kYes : SequenceParallel::kNo;
  dims.router = parallelism.moe_router;
  const std::int64_t others = bounded_product({dims.pp, dims.dp_replicate, dims.cp, dims.tp});
  const int asked = parallelism.data_parallel_shard_degree;
  TESSERA_CHECK(world_size % others == 0, ErrorKind::kConfig,
                "parallelism: found data_parallel_replicate_degree ", dims.dp_replicate,
                dims.cp > 1 ? concat(" x context_parallel_degree ", dims.cp) : std::string(),
                " x tensor_parallel_degree ", dims.tp, " x pipeline_parallel_degree ", dims.pp,
                ", whose product does not divide ", world_size,
                " rank(s); change a degree or start another number of ranks");
  dims.dp_shard = static_cast<int>(world_size / others);
  TESSERA_CHECK(asked == -1 || asked == dims.dp_shard, ErrorKind::kConfig,
                "parallelism.data_parallel_shard_degree: found ", asked, ", expected -1 or ",
                dims.dp_shard, " for ", world_size, " rank(s) and ", others,
                " rank(s) of the other axes");
  layout::check_parts(dims.cp, dims.context_parts);
  check_expert_ranks(dims);
  return dims;
}

void check_positions(const ParallelismConfig& parallelism, std::int64_t positions,
                     std::string_view key) {
  const int tp = parallelism.tensor_parallel_degree;
  const int cp = parallelism.context_parallel_degree;
  const int parts = context_parts(parallelism);
  const int shared_by = parallelism.sequence_parallel ? tp : 1;
  if (cp == 1 && parts == 1) {
    TESSERA_CHECK(positions % shared_by == 0, ErrorKind::kConfig, key, ": found rows of ",
                  positions, " tokens, expected a multiple of tensor_parallel_degree = ", tp,
                  ", whose ranks share them out; change either, or set "
                  "parallelism.sequence_parallel = false");
    return;
  }
  const std::int64_t of_ranks = std::int64_t{cp} * shared_by;
  const std::int64_t step = std::lcm(std::int64_t{parts}, of_ranks);
  // Products of fewer rows than so many have other bits than those of many.
  constexpr std::int64_t kFewestOfRank = 4;
  const std::int64_t fewest = cp > 1 ? kFewestOfRank * cp : 1;
  if (positions % step == 0 && positions >= fewest) return;
  const auto going = [&](std::int64_t at_least) { return (at_least + step - 1) / step * step; };
  const std::int64_t above = going(std::max(positions, fewest));
  const std::int64_t below = positions / step * step;
  const std::string nearest =
      below >= fewest && below > 0 ? concat(below, " or ", above) : concat(above);
  const bool divides_parts = positions % parts == 0;
  TESSERA_CHECK(
      false, ErrorKind::kConfig, key, ": found rows of ", positions, " tokens, expected ",
      positions % step == 0 ? concat("at least ", kFewestOfRank,
                                     " for each of context_parallel_degree = ", cp, " ranks")
      : !divides_parts      ? concat("a multiple of the ", parts,
                                     " parts that a row is cut into (context_parallel_degree = ", cp,
                                     ", context_parallel_parts)")
                            : concat("a multiple of context_parallel_degree = ", cp,
                                     " x tensor_parallel_degree = ", tp, ", whose ranks share them out"),
      "; take rows of ", nearest, ", or change the degrees or parts under [parallelism]");
}

int ranks_to_spawn(const ParallelismConfig& p) {
  constexpr int kMostRanks = 4096;  // on one host
  const int shard = std::max(p.data_parallel_shard_degree, 1);
  const std::int64_t product =
      bounded_product({p.data_parallel_replicate_degree, shard, p.context_parallel_degree,
                       p.tensor_parallel_degree, p.pipeline_parallel_degree});
  TESSERA_CHECK(product <= kMostRanks, ErrorKind::kConfig,
                "parallelism: found degrees whose product is above ", kMostRanks,
                ", which one host cannot start; lower a degree");
  return static_cast<int>(product);
}

std::vector<NamedSource> sources_of(const DataConfig& data) {
  if (data.source.empty()) return {{"data.path", data.path}};
  std::vector<NamedSource> sources;
  for (const DataSource& source : data.source) {
    sources.push_back({concat(kSourceKey, "[", sources.size() + 1, "].path"), source.path});
  }
  return sources;
}

void require_no_batches(const NamedSource& source) {
  TESSERA_CHECK(data_kind(source.path, source.key) != DataKind::kBatches, ErrorKind::kConfig,
                source.key, ": found ", source.path[0],
                ", batches that are ready-made, expected text or .bin; give it as data.path");
}

DataKind data_kind(const DataConfig& data) {
  DataKind kind = DataKind::kTokens;
  for (const NamedSource& source : sources_of(data)) {
    const DataKind found = data_kind(source.path, source.key);
    if (found != DataKind::kTokens) kind = found;
  }
  return kind;
}

DataKind data_kind(const std::vector<std::string>& path, std::string_view key) {
  TESSERA_CHECK(!path.empty(), ErrorKind::kConfig, key, ": found an empty list, expected data");
  for (const std::string& entry : path) {
    TESSERA_CHECK(!entry.empty(), ErrorKind::kConfig, key,
                  ": found an empty name, expected a path");
    TESSERA_CHECK(!ends_with(entry, ".safetensors") || path.size() == 1, ErrorKind::kConfig, key,
                  ": found ", entry, " in a list of ", path.size(),
                  ", expected it alone; only text and .bin files can be listed together");
  }
  if (ends_with(path[0], ".safetensors")) return DataKind::kBatches;
  return std::ranges::all_of(path, [](const auto& entry) { return ends_with(entry, ".bin"); })
             ? DataKind::kTokens
             : DataKind::kText;
}

void require_seq_len(const TrainingConfig& training, std::string_view why) {
  TESSERA_CHECK(training.seq_len, ErrorKind::kConfig,
                "training.seq_len: found nothing, expected the tokens of a row", why);
}

BatchSizes resolve_batch(const TrainingConfig& training, int data_ranks) {
  BatchSizes sizes;
  sizes.local = training.local_batch_size.value_or(1);
  const std::int64_t together = sizes.local * data_ranks;
  sizes.global = training.global_batch_size == -1 ? together : training.global_batch_size;
  TESSERA_CHECK(sizes.global % together == 0, ErrorKind::kConfig,
                "training.global_batch_size: found ", sizes.global, ", expected a multiple of ",
                together, " (local_batch_size ", sizes.local, " x ", data_ranks, " data rank(s))");
  sizes.micro_batches = sizes.global / together;
  return sizes;
}

std::int64_t rows_in_step(const TrainingConfig& training, const ParallelDims& dims) {
  const std::int64_t asked = training.global_batch_size;
  return asked > 0 ? asked : training.local_batch_size.value_or(1) * dims.data_ranks();
}

bool has_schedule(const Config& config) {
  if (config.parallelism.pipeline_parallel_degree > 1) return true;
  return config.pipeline.schedule_file.empty() &&
         pipeline::find_kind(config.pipeline.schedule) == pipeline::Kind::kPairedOneFOneB;
}

std::int64_t resolve_micro_batches(const Config& config, Verb verb, std::int64_t rows_in_step,
                                   int data_ranks) {
  const bool trains = verb != Verb::kGradients;
  const std::int64_t asked = config.pipeline.micro_batches;
  TESSERA_CHECK(asked <= pipeline::kMostMicroBatches, ErrorKind::kConfig,
                "pipeline.micro_batches: found ", asked, ", expected at most ",
                pipeline::kMostMicroBatches);
  if (!trains && asked != -1) return asked;
  const std::int64_t local = config.training.local_batch_size.value_or(
      trains ? 1 : std::max<std::int64_t>(rows_in_step, 1));
  const std::int64_t most_rows = layout::part_of(rows_in_step, data_ranks, 0).size();
  const std::int64_t found = std::max<std::int64_t>(1, (most_rows - 1) / local + 1);
  TESSERA_CHECK(asked == -1 || asked == found, ErrorKind::kConfig, "pipeline.micro_batches: found ",
                asked, ", expected -1 or ", found, ", since ", rows_in_step, " rows of a step on ",
                data_ranks, " data rank(s) are so many times training.local_batch_size ", local,
                "; change one of them");
  return found;
}

Config resolved_for_run(const Config& config, const std::string& run_folder) {
  Config resolved = config;
  const fs::path run = fs::absolute(run_folder).lexically_normal();
  const auto make_absolute = [](std::string& path) {
    if (!path.empty()) path = absolute_under("", path);
  };
  make_absolute(resolved.model.path);
  make_absolute(resolved.model.config);
  make_absolute(resolved.pipeline.schedule_file);
  make_absolute(resolved.compile.plan);
  make_absolute(resolved.contract.lock);
  for (std::string& path : resolved.data.path) make_absolute(path);
  for (DataSource& source : resolved.data.source) {
    for (std::string& path : source.path) make_absolute(path);
  }
  for (std::string& path : resolved.validation.path) make_absolute(path);
  resolved.job.dump_folder = run.string();
  resolved.checkpoint.folder = absolute_under(run, config.checkpoint.folder);
  resolved.metrics.folder = absolute_under(run, config.metrics.folder);
  resolved.optimizer.weight_decay = config.optimizer.effective_weight_decay();
  resolved.optimizer.momentum =
      config.optimizer.momentum.value_or(fsdp::default_momentum(config.optimizer.name));
  return resolved;
}

PrecisionPolicy precision_policy(const PrecisionConfig& precision,
                                 const OptimizerConfig& optimizer) {
  PrecisionPolicy policy;
  policy.param_dtype = precision.param_dtype.dtype;
  policy.reduce_dtype = precision.reduce_dtype.dtype.value_or(DType::kFloat32);
  policy.storage_dtype = precision.storage_dtype.dtype;
  policy.accumulate_dtype = precision.accumulate_dtype.dtype;
  policy.rules = precision.rule;
  policy.param_rounding = precision.param_rounding;
  policy.intrinsic = precision.intrinsic;
  policy.on_narrower_request = precision.on_narrower_request;
  policy.optimizer = {optimizer.master, optimizer.no_decay};
  policy.loss_scaling = true;  // by make_scaler (train/step.h), where it is needed
  return policy;
}

std::int64_t last_whole_step(const LrSchedulerConfig& schedule, std::int64_t steps) {
  if (schedule.decay != LrDecay::kWsd) return schedule.warmup_steps;
  return std::max(schedule.warmup_steps, steps - schedule.decay_steps.value_or(0));
}

double learning_rate(const LrSchedulerConfig& schedule, double lr, std::int64_t steps,
                     std::int64_t step) {
  const std::int64_t warmup = schedule.warmup_steps;
  if (step <= warmup) return lr * static_cast<double>(step) / static_cast<double>(warmup);
  const std::int64_t whole = last_whole_step(schedule, steps);
  if (schedule.decay == LrDecay::kConstant || step <= whole) return lr;
  const double done =
      std::min(1.0, static_cast<double>(step - whole) / static_cast<double>(steps + 1 - whole));
  const double left = schedule.decay == LrDecay::kCosine
                          ? 0.5 * (1.0 + std::cos(std::numbers::pi * done))
                          : 1.0 - done;
  return lr * (schedule.min_lr_factor + (1.0 - schedule.min_lr_factor) * left);
}

}  // namespace tessera::train
