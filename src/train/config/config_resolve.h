// Relations of several keys: those that must hold, degrees filled in for a world, rows and learning
// rate of a step. Pure; anything impossible is refused here with the key's name, before any rank
// starts.
//
// Single values are checked where they are read (config_keys.h). Next: sampler.h for who gets which
// row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "layout/parallel_dims.h"
#include "tessera/error.h"
#include "train/config/config.h"

namespace tessera::train {

/// Which command the configuration is for: they need different keys.
enum class Verb : std::uint8_t { kTrain, kGradients, kContract };

/// Errors: kConfig naming the key: missing ones, contradictions, and nccl on a device whose tensors
/// it does not carry.
void validate(const Config& config, Verb verb);

/// Calls `open` and returns its result; where it cannot open a file or folder, or finds there what
/// it cannot use, the error names the key, option or argument that asked for it. Every path that a
/// user gives is opened through this. Errors: those of `open`; of kinds that name their key
/// themselves as they are.
template <class Open>
auto open_as(std::string_view key, const Open& open) {
  try {
    return open();
  } catch (const Error& error) {
    const std::string_view what = error.what();
    const bool of_path = error.kind() == ErrorKind::kIo || error.kind() == ErrorKind::kFormat ||
                         error.kind() == ErrorKind::kUsage;
    // Not where it begins with a path that begins so.
    const bool is_named = what.starts_with(key) && what.substr(key.size()).starts_with(':');
    if (!of_path || is_named) throw;
    throw Error(error.kind(), concat(key, ": ", what));
  }
}
/// Which of the two names the model.
std::string_view model_key(const ModelConfig& model);

/// The parts that a row is cut into: those that are asked for, else a head and a tail for each rank
/// of context_parallel_degree, of one rank the row as a whole. A run whose rows are packed fills
/// them in before (with_context_parts() of ../data/data_files.h).
int context_parts(const ParallelismConfig& parallelism);

/// The parts of packed rows of `positions` tokens where none are asked for: 8 cp, so that rows of
/// any documents are balanced, or the next multiple of 2 cp below that divides the row; 2 cp where
/// none does.
int parts_of_packed_rows(int cp, std::int64_t positions);

/// Every degree, -1 filled in. Errors: kConfig when no value of data_parallel_shard_degree gives
/// `world_size`, where experts cannot be shared so (expert_tensor is 1 or tensor, and expert x
/// expert_tensor divides data_parallel_shard x context x tensor), or for parts that ranks of
/// context_parallel_degree cannot share.
ParallelDims resolve_parallelism(const ParallelismConfig& parallelism, int world_size);

/// Errors: kConfig for rows of `positions` tokens that are no multiple of their parts, that context
/// and sequence parallelism cannot share out, or that leave a rank fewer than 4 of them; with the
/// nearest valid lengths. `key`: what has these rows.
void check_positions(const ParallelismConfig& parallelism, std::int64_t positions,
                     std::string_view key = "training.seq_len");

/// How many ranks own spawn starts where --nproc is not given: the product of the degrees, -1 as 1.
int ranks_to_spawn(const ParallelismConfig& parallelism);

/// The kind of data that the paths of data.path or validation.path name, by their endings: batches,
/// tokens alone, or text, perhaps with tokens.
enum class DataKind : std::uint8_t { kText, kTokens, kBatches };
/// Errors: kConfig for a list that holds .safetensors among others, or nothing.
DataKind data_kind(const std::vector<std::string>& path, std::string_view key);
/// The kind of all sources together.
DataKind data_kind(const DataConfig& data);

/// Files of a source, and what messages call them.
struct NamedSource {
  std::string key;
  std::vector<std::string> path;
};
inline constexpr auto kSourceKey = "data.source";
/// Errors: kConfig for ready-made batches, which cannot be mixed with other sources.
void require_no_batches(const NamedSource& source);
/// data.path, or the tables of [[data.source]].
std::vector<NamedSource> sources_of(const DataConfig& data);

/// Errors: kConfig where training.seq_len is not given; `why` ends it.
void require_seq_len(const TrainingConfig& training, std::string_view why = "");

/// Rows of a step where the data has none of its own (text, .bin).
struct BatchSizes {
  std::int64_t local = 1;   ///< rows of a micro-batch on a data rank
  std::int64_t global = 1;  ///< rows of a step
  std::int64_t micro_batches = 1;
  bool operator==(const BatchSizes&) const = default;
};
/// Errors: kConfig when global_batch_size is not a multiple of local_batch_size x data ranks.
BatchSizes resolve_batch(const TrainingConfig& training, int data_ranks);

/// As many rows as a step has; where the data says it, as many as training says for a rank.
std::int64_t rows_in_step(const TrainingConfig& training, const ParallelDims& dims);

/// Whether steps follow a schedule of micro-batches: that of a pipeline, or Paired1F1B of one rank.
bool has_schedule(const Config& config);

/// How many micro-batches a step of `rows_in_step` rows has on every data rank. In training and for
/// a contract local_batch_size says it, and pipeline.micro_batches may only say the same; for
/// `gradients` pipeline.micro_batches counts, and -1 is pieces of local_batch_size. Errors: kConfig
/// with both numbers.
std::int64_t resolve_micro_batches(const Config& config, Verb verb, std::int64_t rows_in_step,
                                   int data_ranks);

/// The config as it is written to RUN/config.toml: dump_folder set to `run_folder`; every path
/// absolute, those of checkpoints and metrics under the run, all others under the working folder;
/// optimizer.weight_decay and momentum filled in.
Config resolved_for_run(const Config& config, const std::string& run_folder);

/// The last step at the whole learning rate, behind which it decays: the end of the warm-up, or of
/// LrDecay::kWsd what decay_steps leave of `steps`, if that is later.
std::int64_t last_whole_step(const LrSchedulerConfig& schedule, std::int64_t steps);

/// The learning rate of a step: warm-up, then the decay of [lr_scheduler]. Steps count from 1. lr x
/// step / warmup while step <= warmup; lr up to last_whole_step(); from there to lr x min_lr_factor
/// at step `steps` + 1, which is none of the run's: straight, or along half a cosine.
double learning_rate(const LrSchedulerConfig& schedule, double lr, std::int64_t steps,
                     std::int64_t step);

}  // namespace tessera::train
