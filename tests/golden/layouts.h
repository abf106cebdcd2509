// The same computation under any layout: run_gradients and run_training on thread ranks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "golden/reference.h"
#include "models/model_spec.h"
#include "tessera/compile.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/trainer.h"

namespace tessera::golden {

enum class MicroBatches {
  kWhole,          ///< all rows of a rank in one forward
  kOneRow,         ///< one row a forward, gradients reduced after the last
  kOneRowEachSync  ///< one row a forward, gradients reduced after each
};

struct Layout {
  int ranks = 1;
  int replicas = 1;  ///< dp_replicate; the rest is dp_shard
  bool reshard_after_forward = true;
  MicroBatches micro_batches = MicroBatches::kWhole;
  ThreadBackend backend = ThreadBackend::kInProcess;

  /// Rows of the batch of two that a rank has in one forward: with one everywhere, every layout
  /// adds the same two gradients.
  bool one_row_a_forward() const { return ranks > 1 || micro_batches != MicroBatches::kWhole; }
};
std::string to_string(const Layout& layout);

/// Returns the config of a layout; fp32 compute.
train::Config config_for(const Layout& layout);

enum class Routing { kOwn, kImposed };  ///< of the model, or of the batch file
/// Through the file that run_gradients writes.
Gradients run_gradients(train::Config config, const Layout& layout, const std::string& batch,
                        Routing routing = Routing::kOwn);
/// The one batch of a folder's reference, in fp32.
Gradients run_gradients(const std::filesystem::path& model, const Layout& layout,
                        const std::string& batch);
/// Compares in bf16 compute: the loss, and 1 - cosine of every gradient whose name `compared` holds
/// for (none: of all).
void expect_same_directions(const Gradients& found, const Reference& reference,
                            const std::function<bool(const std::string&)>& compared = {});
void expect_same_bits(const Gradients& found, const Gradients& expected);
/// One rank, row by row, against several ranks: all but a tied weight ([Note: same bits],
/// gradients_test.cpp).
void expect_same_row_sums(Gradients on_one_rank, Gradients on_several, Tied tied);

struct TrainingRun {
  std::vector<double> losses;  ///< by step
  std::vector<double> norms;
  /// By step, of the steps that were asked for, under the names of the files.
  std::map<std::int64_t, Tensors> parameters;
  std::vector<std::string> lines;    ///< metrics.jsonl
  std::vector<ReplayCalls> regions;  ///< by rank, when it ended
  train::TrainingResult result;
};
TrainingRun run_training(train::Config config, const Layout& layout,
                         const std::set<std::int64_t>& keep_parameters_of = {});

enum class OptimizerKind { kSgd, kAdamW };
std::string to_string(OptimizerKind kind);
/// The reference's optimizer settings on the reference's batches.
train::Config training_config(const Reference& reference, OptimizerKind kind, const Layout& layout);

/// Writes a file of one batch: ids at random, every fifth label left out.
std::string batch_file(const models::ModelSpec& spec, std::int64_t rows, std::int64_t tokens);

}  // namespace tessera::golden
