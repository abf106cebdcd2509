#include "train/config/config_keys.h"

#include <string>
#include <utility>
#include <vector>

#include "grad/enum_words.h"
#include "train/config/config_codec.h"

namespace tessera {

// Only configuration uses these words; grad/enum_words.h has those that others share.
constexpr auto words_of(RouterTokens) {
  return std::to_array<Word<RouterTokens>>(
      {{"shards", RouterTokens::kShards}, {"all", RouterTokens::kAll}});
}
constexpr auto words_of(AdjustLr) {
  return std::to_array<Word<AdjustLr>>(
      {{"original", AdjustLr::kOriginal}, {"match_rms_adamw", AdjustLr::kMatchRmsAdamw}});
}
constexpr auto words_of(IterationDType) {
  return std::to_array<Word<IterationDType>>(
      {{"float32", IterationDType::kFloat32}, {"bfloat16", IterationDType::kBFloat16}});
}

}  // namespace tessera

namespace tessera::fsdp {

constexpr auto words_of(OptimizerName) {
  return std::to_array<Word<OptimizerName>>({
#define TESSERA_OPTIMIZER(enumerator, source, name, ...) {name, OptimizerName::enumerator},
#include "fsdp/optim/optimizers.def"
  });
}

}  // namespace tessera::fsdp

namespace tessera::train {
namespace {

// Products of two such counts (steps x rows) fit into 63 bits.
constexpr double kMostCount = 1'000'000'000;

Limit at_least(double low) { return {.low = low, .words = concat("at least ", low)}; }
Limit between(double low, double high) {
  return {.low = low, .high = high, .words = concat("a value from ", low, " to ", high)};
}
Limit count_from(int low) {
  return {.low = static_cast<double>(low),
          .high = kMostCount,
          .words = concat("at least ", low, " and at most ", std::int64_t{1'000'000'000})};
}
Limit below_one() {
  return {.low = 0, .high = 1, .high_excluded = true, .words = "numbers from 0 to 1, 1 excluded"};
}
Limit positive_or_minus_one() {
  return {
      .low = 1, .high = kMostCount, .also = -1, .words = "-1 or at least 1 and at most 1000000000"};
}

// All keys of one section: S is its struct.
template <class S>
class Section {
 public:
  Section(std::vector<ConfigKey>& keys, std::string name, S Config::* section)
      : keys_(keys), name_(std::move(name)), section_(section) {}

  template <class T, class C>
  Section& key(const std::string& name, T C::* member, const KeyText& text,
               const Limit& limit = {}) {
    const auto of = table_key<S>(name, member, text, limit);
    ConfigKey key;
    key.section = name_;
    key.name = name;
    key.type = of.type;
    key.unit = text.unit;
    key.help = text.help;
    if constexpr (requires { Codec<T>::help(); }) key.help += concat(" ", Codec<T>::help(), ".");
    key.set = [full = key.full_name(), section = section_, set = of.set](
                  Config& config, const ConfigValue& value) { set(config.*section, value, full); };
    key.get = [section = section_, get = of.get](const Config& config) {
      return get(config.*section);
    };
    const std::optional<ConfigValue> value = key.get(Config{});
    key.default_text = value ? to_toml(*value) : text.no_default;
    keys_.push_back(std::move(key));
    return *this;
  }

 private:
  std::vector<ConfigKey>& keys_;
  std::string name_;
  S Config::* section_;
};

ConfigKey device_key() {
  ConfigKey key;
  key.name = "device";
  key.type = Codec<DeviceName>::type();
  key.default_text = "\"auto\"";
  key.help =
      "Where tensors live: cuda, a device for each local rank, or cpu; auto is cuda where libtorch "
      "has it, with its driver and a device. At the top of the file.";
  key.set = [](Config& config, const ConfigValue& value) {
    config.device = Codec<DeviceName>::from(value, "device", {});
  };
  key.get = [](const Config& config) { return Codec<DeviceName>::to(config.device); };
  return key;
}

void add_inputs(std::vector<ConfigKey>& keys) {
  Section(keys, "job", &Config::job)
      .key("dump_folder", &JobConfig::dump_folder,
           {"folder", "RUN: where config.toml, metrics, logs and checkpoints go.",
            "outputs/<time>-<name>"});
  Section(keys, "model", &Config::model)
      .key("path", &ModelConfig::path,
           {"folder", "Hugging Face folder, checkpoint or RUN folder to start from."})
      .key("config", &ModelConfig::config,
           {"file", "config.json of a model trained from scratch (instead of path)."})
      .key("allow_unknown_config_keys", &ModelConfig::allow_unknown_config_keys,
           {"", "Warn instead of refuse when config.json has a key that is not known."})
      .key("freeze", &ModelConfig::freeze,
           {"patterns", "Parameters that are not trained; [] trains all.", "the family's"})
      .key("frozen", &ModelConfig::frozen,
           {"",
            "How frozen parameters are kept: shard like trained ones, or replicate: whole on every "
            "rank in the compute dtype, never gathered."})
      .key("aux_loss_coef", &ModelConfig::aux_loss_coef,
           {"",
            "Weight of the router's auxiliary loss, which is of each micro-batch by itself: "
            "training.local_batch_size changes it.",
            "0, or what config.json says"},
           at_least(0))
      .key(
          "load_balance_coeff", &ModelConfig::load_balance_coeff,
          {"",
           "Step of a bias on the choice of experts that evens out their load without an auxiliary "
           "loss; 0 is off."},
          at_least(0))
      .key("score_before_experts", &ModelConfig::score_before_experts,
           {"",
            "Experts see their tokens times the routing weight, instead of their results being "
            "weighted."});
}

void add_rows(std::vector<ConfigKey>& keys) {
  Section(keys, "data", &Config::data)
      .key("path", &DataConfig::path,
           {"files",
            "Text files, folders of *.txt and NAME.bin, one or a list, * and ? as in a shell; or "
            "X.safetensors."})
      .key("source", &DataConfig::source, {"", "[[data.source]], in place of data.path:"})
      .key(
          "packing", &DataConfig::packing,
          {"",
           "Whole documents in a row, each as if it were alone, or one behind the other, cut where "
           "a row ends.",
           "documents where NAME.mask.bin and NAME.docs.bin are, else stream"});
  Section(keys, "training", &Config::training)
      .key("steps", &TrainingConfig::steps, {"steps", "Optimizer steps of the run.", "required"},
           count_from(1))
      .key("seq_len", &TrainingConfig::seq_len,
           {"tokens", "Predicted tokens of a row.", "required; .safetensors data has its own"},
           count_from(1))
      .key("local_batch_size", &TrainingConfig::local_batch_size,
           {"rows", "Rows of a micro-batch on a data rank.", "1; all rows in `gradients`"},
           count_from(1))
      .key("global_batch_size", &TrainingConfig::global_batch_size,
           {"rows",
            "Rows of a step; -1 is local_batch_size x data ranks, on resume the checkpoint's; a "
            "multiple makes micro-batches."},
           positive_or_minus_one())
      .key("max_norm", &TrainingConfig::max_norm,
           {"", "The gradient norm is clipped to this; 0 is off."}, at_least(0))
      .key("sync_every_micro_batch", &TrainingConfig::sync_every_micro_batch,
           {"", "Reduce gradients after each micro-batch instead of once a step (less memory)."});
}

void add_layout(std::vector<ConfigKey>& keys) {
  using P = ParallelismConfig;
  Section(keys, "parallelism", &Config::parallelism)
      .key("data_parallel_replicate_degree", &P::data_parallel_replicate_degree,
           {"ranks", "Replicas of the sharded model (HSDP)."}, count_from(1))
      .key("data_parallel_shard_degree", &P::data_parallel_shard_degree,
           {"ranks", "Ranks that share one copy of the model; -1 is what the others leave."},
           positive_or_minus_one())
      .key("tensor_parallel_degree", &P::tensor_parallel_degree,
           {"ranks", "Ranks that share every layer's matrices."}, count_from(1))
      .key("expert_parallel_degree", &P::expert_parallel_degree,
           {"ranks", "Ranks that share the experts of a layer; taken from dp_shard, cp and tp."},
           count_from(1))
      .key("expert_tensor_parallel_degree", &P::expert_tensor_parallel_degree,
           {"ranks", "Ranks that share the matrices of one expert: 1, or tensor_parallel_degree."},
           count_from(1))
      .key("pipeline_parallel_degree", &P::pipeline_parallel_degree,
           {"ranks", "Ranks that compute stages of the model side by side; see [pipeline]."},
           count_from(1))
      .key("context_parallel_degree", &P::context_parallel_degree,
           {"ranks", "Ranks that share the positions of every row."}, count_from(1))
      .key("context_parallel_form", &P::context_parallel_form,
           {"",
            "How attention sees a row that ranks share: gather keys and values, or exchange "
            "positions for heads, where cp x tp divides the key and value heads."})
      .key("context_parallel_parts", &P::context_parallel_parts,
           {"parts",
            "Equal parts that a row is cut into, a multiple of 2 cp: they fix the order of sums, "
            "so that runs with as many parts have the same bits.",
            "2 cp; of packed rows 8 cp, or fewer that divide the row; 1 where cp is 1"},
           count_from(1))
      .key("sequence_parallel", &P::sequence_parallel,
           {"",
            "Between layers each tensor parallel rank holds a part of every row's positions, not "
            "all "
            "of them."})
      .key(
          "moe_router", &P::moe_router,
          {"",
           "Which tokens a tensor parallel rank routes where experts are whole: shards, or all for "
           "comparison."})
      .key("reshard_after_forward", &P::reshard_after_forward,
           {"", "Release gathered parameters after forward and gather them again for backward."});
}

void add_pipeline(std::vector<ConfigKey>& keys) {
  using S = PipelineConfig;
  Section(keys, "pipeline", &Config::pipeline)
      .key("schedule", &S::schedule,
           {"",
            "Order of forwards and backwards: GPipe, 1F1B, Interleaved1F1B, ZB1P, "
            "InterleavedZeroBubble, ZBV, DualPipeV, Paired1F1B, or PyTorch's names of them."})
      .key("schedule_file", &S::schedule_file,
           {"file", "CSV of a schedule in its place, as `tessera schedule` and PyTorch write it."})
      .key("micro_batches", &S::micro_batches,
           {"",
            "-1 is global_batch_size / (local_batch_size x data ranks), another number must equal "
            "that; in `gradients` the pieces of a rank's rows."},
           positive_or_minus_one())
      .key("stages_per_rank", &S::stages_per_rank,
           {"stages", "Stages that a rank of the pipeline has.", "the schedule's"}, count_from(1))
      .key("split", &S::split,
           {"layers",
            "First layer of each stage: [0, 3] is layers 0 to 2, then the others; [] is by cost."},
           count_from(0))
      .key("reshard", &S::reshard,
           {"",
            "How often a stage is gathered: once a step, or for each micro_batch (less memory, "
            "more traffic).",
            "step; of one rank as reshard_after_forward says"})
      .key(
          "overlap", &S::overlap,
          {"",
           "Exchanges of a forward that run while the backward of its pair computes, and the other "
           "way round: of experts, all (tensor parallel ones, too), or off: the backward, then the "
           "forward."});
}

void add_plan(std::vector<ConfigKey>& keys) {
  using C = CompileConfig;
  Section(keys, "compile", &Config::compile)
      .key("mode", &C::mode,
           {"",
            "off: steps gather, keep and release as reshard_after_forward says; plan: as chosen "
            "for memory_budget, or as plan says; replay: the same, and layers are recorded, "
            "compared "
            "with eager ones and then run without autograd, bit for bit. In a pipeline replay "
            "alone."})
      .key("plan", &C::plan,
           {"file", "A plan as `tessera plan --json` writes it; then nothing is chosen."})
      .key("memory_budget", &C::memory_budget,
           {"bytes",
            "Of all that a rank holds in a step: bytes, a size as \"72GiB\" or \"80GB\" (\"80G\"), "
            "or a share "
            "of what it has of its host's or its device's memory, as \"90%\"; without one nothing "
            "is bounded, and recompute and keep are left out.",
            "none"})
      .key("form", &C::form,
           {"",
            "ZeRO's stage: 3 gathers for each forward and backward, 2 once a step and reduces with "
            "every micro-batch, 1 once a step and reduces with the last."},
           between(1, 3))
      .key("passes", &C::passes,
           {"", "What chooses, in this order: recompute, keep, prefetch.", "all that apply"});
}

void add_update(std::vector<ConfigKey>& keys) {
  using O = OptimizerConfig;
  Section optimizer(keys, "optimizer", &Config::optimizer);
  optimizer.key("name", &O::name, {"", "Update rule; formulas as PyTorch's."})
      .key("master", &O::master,
           {"",
            "Where the full value of a 16-bit shard is kept: auto next to it (16 more bits for "
            "bfloat16, a float32 copy for float16), none nowhere: updates below half a step of it "
            "are lost."})
      .key("lr", &O::lr, {"", "Learning rate.", "required"}, at_least(0));
#define TESSERA_HYPERPARAMETER(name, type, value, range, ...) \
  optimizer.key(#name, &O::name, {"", __VA_ARGS__}, range);
#include "fsdp/optim/optimizers.def"
  optimizer.key("no_decay", &O::no_decay,
                {"patterns", "Parameters without weight decay; frozen ones count as matched."});
  optimizer.key("rule", &O::rule, {"", "[[optimizer.rule]], of which the last match wins:"});
  using L = LrSchedulerConfig;
  Section(keys, "lr_scheduler", &Config::lr_scheduler)
      .key("warmup_steps", &L::warmup_steps,
           {"steps",
            "lr x step / warmup_steps up to that step. Here and in the decay steps that are left "
            "out "
            "(float16, no label) do not count."},
           count_from(0))
      .key("decay", &L::decay,
           {"",
            "From the end of the warm-up, or with wsd (warm-up, stable, decay) in the last "
            "decay_steps; it would be at its end one step after training.steps."})
      .key("decay_steps", &L::decay_steps,
           {"steps", "How many last steps wsd decays in, straight.", "required by wsd"},
           count_from(1))
      .key("min_lr_factor", &L::min_lr_factor, {"", "Where the decay ends, as a part of lr."},
           between(0, 1));
  using V = ValidationConfig;
  Section(keys, "validation", &Config::validation)
      .key("path", &V::path, {"files", "Held-out data, as data.path; [] is no validation."})
      .key("interval", &V::interval,
           {"steps",
            "Steps between validations, besides those before the first and after the last."},
           count_from(1))
      .key("steps", &V::steps,
           {"batches", "Batches of a validation, each row at most once; -1 is all of them."},
           positive_or_minus_one());
}

void add_debug(std::vector<ConfigKey>& keys) {
  using B = DebugConfig;
  Section(keys, "debug", &Config::debug)
      .key("seed", &B::seed, {"", "Of initial weights and of the order of rows."}, at_least(0))
      .key("check_dtypes", &B::check_dtypes,
           {"",
            "Runs the first forward once more before the first step, names every operation "
            "whose result leaves its unit's dtype and the tensor that caused it, and ends "
            "with exit code 3 if there is one."})
      .key("check_placements", &B::check_placements,
           {"",
            "Once a step, after its last backward, compares, bit for bit, gradients that are to be "
            "the same on all ranks of tp, and ends with exit code 3 where they differ."})
      .key("guard", &B::guard,
           {"steps",
            "Every N steps, after the update, ranks that hold the same elements of "
            "parameters, gradients, optimizer state and buffers compare hashes of them, and those "
            "that have the same rows of these; ends with exit code 3 where they differ, naming "
            "tensor, axis and ranks. 0: never."},
           at_least(0))
      .key("deterministic", &B::deterministic,
           {"",
            "On devices takes kernels whose sums do not vary from run to run: slower. What has "
            "none ends the run. CUBLAS_WORKSPACE_CONFIG is set to :4096:8 where it is not set."})
      .key("on_nonfinite", &B::on_nonfinite,
           {"", "What a non-finite loss does: error names the first parameters concerned."});
}

void add_outputs(std::vector<ConfigKey>& keys) {
  using K = CheckpointConfig;
  Section(keys, "checkpoint", &Config::checkpoint)
      .key("enable", &K::enable,
           {"", "Write checkpoints, and resume from one; the last step is always saved."})
      .key("folder", &K::folder, {"folder", "Where they go, relative to RUN."})
      .key("interval", &K::interval, {"steps", "Steps between checkpoints."}, count_from(1))
      .key("keep_latest_k", &K::keep_latest_k, {"checkpoints", "How many are kept; 0 is all."},
           count_from(0))
      .key("load_step", &K::load_step,
           {"step",
            "-1 resumes from the latest if there is one, 0 starts a new run, N resumes there."},
           count_from(-1));
  using M = MetricsConfig;
  Section(keys, "metrics", &Config::metrics)
      .key("folder", &M::folder, {"folder", "Where metrics.jsonl goes, relative to RUN."})
      .key("log_freq", &M::log_freq, {"steps", "Steps between lines on stdout."}, count_from(1))
      .key(
          "enable_tensorboard", &M::enable_tensorboard,
          {"", "Write TensorBoard event files to tb/ in that folder; tags are the metrics' names."})
      .key("trace_steps", &M::trace_steps,
           {"steps",
            "Steps of which a trace is written to trace/step-N.json in that folder, for "
            "ui.perfetto.dev: one row a rank and queue."},
           count_from(1));
  using C = CommConfig;
  Section(keys, "comm", &Config::comm)
      .key("backend", &C::backend,
           {"",
            "auto is nccl on cuda and gloo on the cpu. nccl carries tensors of cuda devices only; "
            "gloo those too, through the host's memory: slower."})
      .key("init_timeout_seconds", &C::init_timeout_seconds,
           {"seconds", "How long ranks wait for each other up to the first step."},
           between(1, 86400))
      .key("timeout_seconds", &C::timeout_seconds,
           {"seconds", "Longest wait of a collective in the steps."}, between(1, 86400))
      .key("master_addr", &C::master_addr,
           {"", "Address of rank 0 where the launcher gives none.",
            "MASTER_ADDR; else 127.0.0.1 on one host; under Slurm the first host of the step; "
            "else refused"})
      .key("master_port", &C::master_port, {"", "Its port.", "MASTER_PORT, else chosen"},
           between(1, 65535));
}

void add_adapters_and_scaler(std::vector<ConfigKey>& keys) {
  using R = LoraRequest;
  Section(keys, "lora", &Config::lora)
      .key("rank", &R::rank,
           {"",
            "Rank of the adapters that are trained with a frozen model; 0 trains the model "
            "itself."},
           count_from(0))
      .key("alpha", &R::alpha,
           {"", "The adapters' part of a result is multiplied by alpha / rank; above 0.", "rank"},
           at_least(0))
      .key("targets", &R::targets,
           {"patterns",
            "Linear layers that get an adapter, by the end of their names: q_proj, "
            "layers.0.self_attn.*; products of experts where they are named: "
            "experts.gate_up_proj, experts.down_proj."})
      .key("dropout", &R::dropout,
           {"", "Share of an adapter's input that is dropped in training; none of experts'."},
           below_one());
  using S = GradScalerOptions;
  Section(keys, "grad_scaler", &Config::grad_scaler)
      .key("init_scale", &S::init_scale,
           {"",
            "What the loss is first multiplied by, where float16 computes or carries gradients; "
            "this and the factors are powers of two."})
      .key("growth_factor", &S::growth_factor, {"", "Factor after growth_interval finite steps."},
           at_least(1))
      .key("backoff_factor", &S::backoff_factor,
           {"", "Factor after a step whose gradients are not finite; that step is left out."},
           between(0, 1))
      .key("growth_interval", &S::growth_interval,
           {"steps", "Finite steps in a row before the scale grows."}, count_from(1))
      .key("min_scale", &S::min_scale,
           {"", "The smallest scale; gradients that are not finite at it end the run."});
}

// [precision], [activation_checkpoint], [lora], [grad_scaler].
void add_precision(std::vector<ConfigKey>& keys) {
  using D = PrecisionConfig;
  Section(keys, "precision", &Config::precision)
      .key("param_dtype", &D::param_dtype,
           {"", "Parameters in forward and backward; auto is their storage dtype."})
      .key("param_rounding", &D::param_rounding,
           {"",
            "How float32 storage becomes bfloat16 parameters: halves to even, or away from zero as "
            "bfloat16 storage with its master rounds."})
      .key("reduce_dtype", &D::reduce_dtype, {"", "Gradients on the wire; auto is float32."})
      .key("storage_dtype", &D::storage_dtype, {"", "Sharded parameters; auto is the file's."})
      .key("accumulate_dtype", &D::accumulate_dtype,
           {"", "Gradient sums before and after the wire; never narrower than reduce_dtype."})
      .key("activation_reduce_dtype", &D::activation_reduce_dtype,
           {"", "Sums of activations over ranks; auto is the activation's own."})
      .key("intrinsic", &D::intrinsic,
           {"",
            "Which tensors of a checkpoint compute in their stored dtype at least: those stored "
            "wider than most of it, all, or none."})
      .key("on_narrower_request", &D::on_narrower_request,
           {"",
            "What a storage_dtype does that cannot hold a tensor's values: keep the file's dtype, "
            "narrow the values, or error."})
      .key("rule", &D::rule, {"", "[[precision.rule]], of which the last match wins:"});
  Section(keys, "contract", &Config::contract)
      .key("lock", &ContractConfig::lock,
           {"file",
            "What `tessera inspect --contract --lock` wrote: a run whose parameters, dtypes, "
            "placements or sums are others is refused, with what has changed."});
  Section(keys, "activation_checkpoint", &Config::activation_checkpoint)
      .key("mode", &ActivationCheckpointConfig::mode,
           {"",
            "What a layer forgets after forward and computes again for backward: none, full: all "
            "but its input, selective: all but its input and the results of its weight products. "
            "For every layer: a plan chooses by layer only where the key is left out.",
            "none"});
  add_adapters_and_scaler(keys);
}

std::vector<ConfigKey> make_keys() {
  std::vector<ConfigKey> keys{device_key()};
  add_inputs(keys);
  add_rows(keys);
  add_layout(keys);
  add_pipeline(keys);
  add_plan(keys);
  add_precision(keys);
  add_update(keys);
  add_outputs(keys);
  add_debug(keys);
  return keys;
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

}  // namespace tessera::train
