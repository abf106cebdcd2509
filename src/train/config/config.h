// The run configuration as a value: one struct a section of the TOML file, with every default.
//
// Name, unit, range and help text of a key stand in the key table (config_keys.h);
// parsing, --help, overrides and the dump are all made from that one table. Nothing here reads
// files or knows torch. Next: config_keys.h, then config_resolve.h for what follows from several
// keys at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/lora_spec.h"
#include "base/text/words.h"
#include "fsdp/optim/optimizer_registry.h"
#include "layout/parallel_dims.h"
#include "pipeline/interleave.h"
#include "tessera/loss_scale.h"
#include "tessera/precision.h"
#include "tessera/recompute_mode.h"

namespace tessera {

constexpr auto words_of(ContextForm) {
  return std::to_array<Word<ContextForm>>(
      {{"gather", ContextForm::kGather}, {"heads", ContextForm::kHeads}});
}

}  // namespace tessera

namespace tessera::train {

enum class DeviceName : std::uint8_t { kAuto, kCpu, kCuda };
constexpr auto words_of(DeviceName) {
  return std::to_array<Word<DeviceName>>(
      {{"auto", DeviceName::kAuto}, {"cpu", DeviceName::kCpu}, {"cuda", DeviceName::kCuda}});
}
using OptimizerName = fsdp::OptimizerName;
enum class LrDecay : std::uint8_t {
  kConstant,
  kLinear,
  kCosine,
  kWsd,  ///< warm-up, stable, then straight down in the last steps
};
constexpr auto words_of(LrDecay) {
  return std::to_array<Word<LrDecay>>({{"constant", LrDecay::kConstant},
                                       {"linear", LrDecay::kLinear},
                                       {"cosine", LrDecay::kCosine},
                                       {"wsd", LrDecay::kWsd}});
}
enum class BackendName : std::uint8_t {
  kAuto,
#define TESSERA_BACKEND(enumerator, ...) enumerator,
#include "comm/backends/backends.def"
};
constexpr auto words_of(BackendName) {
  return std::to_array<Word<BackendName>>({
      {"auto", BackendName::kAuto},
#define TESSERA_BACKEND(enumerator, folder, name, ...) {name, BackendName::enumerator},
#include "comm/backends/backends.def"
  });
}
/// How often a stage of a pipeline is gathered.
enum class PipelineReshard : std::uint8_t {
  kStep,        ///< before its first forward, until its last backward
  kMicroBatch,  ///< unit by unit, in each forward and backward
};
constexpr auto words_of(PipelineReshard) {
  return std::to_array<Word<PipelineReshard>>(
      {{"step", PipelineReshard::kStep}, {"micro_batch", PipelineReshard::kMicroBatch}});
}
/// How a step's plan comes to be.
enum class CompileChoice : std::uint8_t {
  kOff,     ///< eagerly
  kPlan,    ///< chosen for a budget, or given
  kReplay,  ///< the same, and regions are replayed
};
constexpr auto words_of(CompileChoice) {
  return std::to_array<Word<CompileChoice>>({{"off", CompileChoice::kOff},
                                             {"plan", CompileChoice::kPlan},
                                             {"replay", CompileChoice::kReplay}});
}
enum class OnNonfinite : std::uint8_t { kError };
constexpr auto words_of(OnNonfinite) {
  return std::to_array<Word<OnNonfinite>>({{"error", OnNonfinite::kError}});
}

/// A dtype of [precision]: none is written `auto`.
struct DTypeChoice {
  std::optional<DType> dtype;
  bool operator==(const DTypeChoice&) const = default;
};

struct JobConfig {
  std::optional<std::string> dump_folder;  ///< RUN; none = outputs/<time>-<name>
  bool operator==(const JobConfig&) const = default;
};

struct ModelConfig {
  std::string path;    ///< Hugging Face folder
  std::string config;  ///< config.json of a model trained from scratch
  bool allow_unknown_config_keys = false;
  std::optional<std::vector<std::string>> freeze;  ///< none = the family's default
  FrozenAs frozen = FrozenAs::kShard;              ///< how frozen parameters are kept
  std::optional<double> aux_loss_coef;             ///< none = what config.json says
  double load_balance_coeff = 0.0;                 ///< 0 = no bias on the choice of experts
  bool score_before_experts = false;
  bool operator==(const ModelConfig&) const = default;
};

/// One of several sources of a run.
struct DataSource {
  std::vector<std::string> path;  ///< as data.path
  double weight = 1.0;            ///< rows are drawn in proportion
  bool operator==(const DataSource&) const = default;
};

/// How documents stand in rows.
enum class Packing : std::uint8_t {
  kStream,     ///< one behind the other, cut where a row ends; they see each other
  kDocuments,  ///< whole, each as if it were alone
};
constexpr auto words_of(Packing) {
  return std::to_array<Word<Packing>>(
      {{"stream", Packing::kStream}, {"documents", Packing::kDocuments}});
}

struct DataConfig {
  std::vector<std::string> path;
  std::vector<DataSource> source;                 ///< [[data.source]], in place of path
  std::optional<Packing> packing = std::nullopt;  ///< none = by the files next to the data
  bool operator==(const DataConfig&) const = default;
};

struct TrainingConfig {
  std::optional<std::int64_t> steps;
  std::optional<std::int64_t> seq_len;
  std::optional<std::int64_t> local_batch_size;  ///< none = 1 in train, all rows in gradients
  std::int64_t global_batch_size = -1;           ///< -1 = local_batch_size x data ranks
  double max_norm = 1.0;
  bool sync_every_micro_batch = false;
  bool operator==(const TrainingConfig&) const = default;
};

struct ParallelismConfig {
  int data_parallel_replicate_degree = 1;
  int data_parallel_shard_degree = -1;  ///< -1 = what the other axes leave of the world
  int tensor_parallel_degree = 1;
  int expert_parallel_degree = 1;
  int expert_tensor_parallel_degree = 1;
  int pipeline_parallel_degree = 1;
  int context_parallel_degree = 1;
  ContextForm context_parallel_form = ContextForm::kGather;
  std::optional<int> context_parallel_parts = std::nullopt;  ///< none = context_parts()
  bool sequence_parallel = true;
  RouterTokens moe_router = RouterTokens::kShards;
  bool reshard_after_forward = true;
  bool operator==(const ParallelismConfig&) const = default;
};

struct PipelineConfig {
  std::string schedule = "1F1B";       ///< one of pipeline::kinds(), or PyTorch's name of it
  std::string schedule_file;           ///< CSV in its place; empty = none
  std::int64_t micro_batches = -1;     ///< -1 = as many as the batch sizes make
  std::optional<int> stages_per_rank;  ///< none = the schedule's
  std::vector<std::int64_t> split;     ///< first layers of the stages; empty = by cost
  /// none = step; of one rank micro_batch, so that reshard_after_forward says it
  std::optional<PipelineReshard> reshard;
  pipeline::Overlap overlap = pipeline::Overlap::kExperts;  ///< in pairs of a schedule
  bool operator==(const PipelineConfig&) const = default;
};

/// A limit on a rank's memory: bytes, or a share of what the machine has for each of its ranks.
struct MemoryBudget {
  std::int64_t bytes = 0;
  double share = 0.0;  ///< above 0 where it is a share: "90%" is 0.9
  bool operator==(const MemoryBudget&) const = default;
};

struct CompileConfig {
  CompileChoice mode = CompileChoice::kOff;
  std::string plan;  ///< a plan's file; empty = chosen by passes
  std::optional<MemoryBudget> memory_budget;
  int form = 3;
  std::optional<std::vector<std::string>> passes;  ///< none = all that apply
  bool operator==(const CompileConfig&) const = default;
};

struct PrecisionConfig {
  DTypeChoice param_dtype{DType::kBFloat16};
  Rounding param_rounding = Rounding::kNearestEven;
  DTypeChoice reduce_dtype{DType::kFloat32};
  DTypeChoice storage_dtype{DType::kFloat32};
  DTypeChoice accumulate_dtype{DType::kFloat32};
  DTypeChoice activation_reduce_dtype;  ///< none = the activation's own
  Intrinsic intrinsic = Intrinsic::kMinority;
  NarrowerRequest on_narrower_request = NarrowerRequest::kKeep;
  std::vector<PrecisionRule> rule;
  bool operator==(const PrecisionConfig&) const = default;
};

struct ActivationCheckpointConfig {
  std::optional<RecomputeMode> mode;  ///< none: not set, and plans may choose
  /// The mode of every layer, as far as no plan chooses.
  RecomputeMode of_layers() const { return mode.value_or(RecomputeMode::kNone); }
  bool operator==(const ActivationCheckpointConfig&) const = default;
};

struct OptimizerConfig : fsdp::Hyperparameters {
  OptimizerName name = OptimizerName::kAdamW;
  MasterRequest master = MasterRequest::kAuto;
  std::optional<double> lr;
  std::vector<std::string> no_decay;
  double effective_weight_decay() const {
    return weight_decay.value_or(fsdp::default_weight_decay(name));
  }
  bool operator==(const OptimizerConfig&) const = default;
};

struct LrSchedulerConfig {
  std::int64_t warmup_steps = 0;
  LrDecay decay = LrDecay::kConstant;
  std::optional<std::int64_t>
      decay_steps{};  ///< of kWsd, which needs it; none of the others has it
  double min_lr_factor = 0.0;
  bool operator==(const LrSchedulerConfig&) const = default;
};

struct ValidationConfig {
  std::vector<std::string> path;  ///< empty = no validation
  std::int64_t interval = 100;
  std::int64_t steps = 10;
  bool operator==(const ValidationConfig&) const = default;
};

struct CheckpointConfig {
  bool enable = true;
  std::string folder = "checkpoint";
  std::int64_t interval = 500;
  std::int64_t keep_latest_k = 0;
  std::int64_t load_step = -1;
  bool operator==(const CheckpointConfig&) const = default;
};

struct MetricsConfig {
  std::string folder = "metrics";
  std::int64_t log_freq = 1;
  bool enable_tensorboard = true;
  std::vector<std::int64_t> trace_steps;
  bool operator==(const MetricsConfig&) const = default;
};

struct CommConfig {
  BackendName backend = BackendName::kAuto;
  std::int64_t init_timeout_seconds = 300;
  std::int64_t timeout_seconds = 100;
  std::optional<std::string> master_addr;
  std::optional<std::int64_t> master_port;
  bool operator==(const CommConfig&) const = default;
};

struct ContractConfig {
  std::string lock;  ///< a lock's file (grad/contract_lock.h); empty = none
  bool operator==(const ContractConfig&) const = default;
};

struct DebugConfig {
  std::int64_t seed = 42;
  bool check_dtypes = false;
  bool check_placements = false;
  std::int64_t guard = 0;  ///< compares replicas every N steps; 0 = never
  bool deterministic = false;
  OnNonfinite on_nonfinite = OnNonfinite::kError;
  bool operator==(const DebugConfig&) const = default;
};

struct Config {
  DeviceName device = DeviceName::kAuto;  ///< the one key outside all sections
  JobConfig job;
  ModelConfig model;
  DataConfig data;
  TrainingConfig training;
  ParallelismConfig parallelism;
  PipelineConfig pipeline;
  CompileConfig compile;
  PrecisionConfig precision;
  ContractConfig contract;
  ActivationCheckpointConfig activation_checkpoint;
  LoraRequest lora;
  GradScalerOptions grad_scaler;
  OptimizerConfig optimizer;
  LrSchedulerConfig lr_scheduler;
  ValidationConfig validation;
  CheckpointConfig checkpoint;
  MetricsConfig metrics;
  CommConfig comm;
  DebugConfig debug;
  bool operator==(const Config&) const = default;
};

/// Reads a TOML text over the defaults. `source` is the file name that messages show.
/// Errors: kConfig as "file:line:column: ..." for syntax, wrong types, values out of range and
/// unknown keys (with the nearest name). What follows from several keys is left to validate().
Config parse_config(std::string_view text, std::string_view source);

/// parse_config of a file. Errors: kIo when it cannot be read, else as parse_config.
Config load_config(const std::string& path);

/// `--section.key VALUE`: VALUE is read as TOML, a bare word as a string. Errors: kUsage for a key
/// that does not exist (with the nearest name), kConfig for a value that does not fit.
void apply_override(Config& config, std::string_view key, std::string_view value);

/// TOML text of every key that has a value; parse_config gives the same Config back.
std::string to_toml(const Config& config);

/// The precision policy that the config asks of fully_shard.
PrecisionPolicy precision_policy(const PrecisionConfig& precision,
                                 const OptimizerConfig& optimizer = {});

}  // namespace tessera::train
