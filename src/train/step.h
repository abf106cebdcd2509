// Forward and backward of one global batch, and by what its loss is scaled: what train and
// gradients have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "layout/range.h"
#include "models/language_model.h"
#include "moe/routing.h"
#include "tessera/error.h"
#include "tessera/grad_scaler.h"
#include "tessera/shard.h"
#include "tessera/world.h"
#include "train/data/data.h"
#include "train/data/sampler.h"
#include "train/expert_balance.h"

namespace tessera::train {

struct Config;

/// The addends of the rows of one of several sources.
struct SourceLoss {
  double sum = 0;
  std::int64_t kept = 0;
};

struct BatchLoss {
  double sum = 0;         ///< of the token losses of all data ranks
  std::int64_t kept = 0;  ///< labels that count, of all data ranks
  double auxiliary = 0;   ///< before its weight, the mean over micro-batches; 0 where it has none
  /// How many tokens of all data ranks chose each expert, a vector a layer with experts.
  std::vector<std::vector<double>> chosen = {};
  std::vector<SourceLoss> of_sources = {};  ///< empty where the run has one
  double mean() const { return sum / static_cast<double>(kept); }
};

/// The results of micro-batches, where they run: numbers that the host has not read. A pipeline has
/// one a stage, which are added up one by one.
struct Found {
  std::vector<at::Tensor> losses;     ///< [] a micro-batch: the sum over the tokens of its rows
  std::vector<at::Tensor> auxiliary;  ///< [] a micro-batch: this rank's addend
  double auxiliary_share = 1.0;       ///< of each of these in the mean
  ChosenExperts chosen;               ///< of the layers with experts that are here
  std::vector<std::size_t> layers;    ///< which ones those are among all of the model
};

/// The sources of this rank's rows whose losses were noted.
struct RowsOfSources {
  std::size_t sources = 0;  ///< 0 where the run has one
  std::vector<std::size_t> source = {};
  std::vector<std::int64_t> kept = {};
  at::Tensor losses = {};  ///< [rows] fp64, of each; undefined where there is none
};

/// A step's numbers before they are read.
class PendingLoss {
 public:
  /// The loss of a step without an unmasked target, of which nothing was run.
  PendingLoss() = default;
  /// `routed`: of the whole model; `scores`: what its experts noted on the way.
  PendingLoss(const BatchLoss& counted, std::vector<Found> found,
              const models::RoutedExperts& routed, moe::NotedScores scores,
              RowsOfSources rows = {});

  /// Labels of the step that count, of all data ranks: where there are none nothing was run.
  std::int64_t kept() const { return counted_.kept; }

  /// For one read with all else that a step reads (comm::read_on_host). Some may be undefined.
  const std::vector<at::Tensor>& numbers() const { return numbers_; }
  /// With those of all ranks; `read`: the numbers on the host. Collective. Errors: kNumeric naming
  /// a layer whose router's scores are not finite on this rank.
  BatchLoss added(const ShardedBase& model, std::span<const at::Tensor> read) const;

 private:
  BatchLoss counted_;  // with zeros of each layer
  std::vector<Found> found_;
  moe::NotedScores scores_;
  RowsOfSources rows_;
  // For each Found: losses, auxiliary, chosen; then the numbers of scores_ and rows_.
  std::vector<at::Tensor> numbers_;
};

/// The sums over ranks besides gradients.
enum class RankSum : std::uint8_t {
  kLabels,      ///< labels that count
  kRouterLoad,  ///< of the auxiliary loss: how often each expert was chosen, all layers pooled
  kStep,        ///< BatchLoss: the losses, then each layer's counts
  kSources,     ///< of each source its loss and its labels; of all stages, as kStep
};
/// The sum of every rank's values, by rank: each added up in rank order.
std::vector<double> added_by_rank(const std::vector<std::vector<double>>& of_ranks);
/// The same sum of every data rank's values; what ranks of tp share one of them adds, as one of cp
/// what is of whole rows. The losses
/// are added in rank order, counts on the way: what a rank sends of them grows with log2 of the
/// ranks only. Of a pipeline kStep is of all stages, which have zeros for what is another's; of
/// the other sums every stage has the same. Collective.
std::vector<double> sum_over_ranks(const ShardedBase& model, RankSum what,
                                   const std::vector<double>& values);
/// The largest of every rank's values. Collective.
std::vector<double> max_over_ranks(const ShardedBase& model, const std::vector<double>& values);

class PipelineOfRun;

enum class Sync : std::uint8_t { kLastMicroBatch, kEveryMicroBatch };

/// How the micro-batches of a step are run.
struct StepOptions {
  Sync sync = Sync::kLastMicroBatch;
  std::uint64_t seed = 0;   ///< of what is drawn in forward (dropout)
  double loss_scale = 1.0;  ///< the model's scaler's
  /// Weight of the auxiliary loss as model.aux_loss_coef has it; none = what config.json says.
  std::optional<double> aux_loss_coef = std::nullopt;
  PipelineOfRun* pipeline = nullptr;  ///< by which the model's stages are run; null = it is whole
};

/// As the config says, at the scaler's present scale; null where the loss is not scaled.
StepOptions step_options(const Config& config, const GradScaler* scaler);

/// Runs all micro-batches; the shards have gradients of the mean loss afterwards, with those of the
/// auxiliary loss. Collective: every rank passes as many row ranges (empty ones for nothing).
/// Errors: kFormat when the batch has no unmasked target; kConfig naming the key when memory runs
/// out.
BatchLoss forward_backward(Sharded<models::LanguageModel>& model, const BatchSource& source,
                           std::int64_t step, const std::vector<RowRange>& rows,
                           const StepOptions& options);
/// The same without a look at the numbers: on a device the step may still run. A batch without an
/// unmasked target is no error here: nothing of it is run, on any rank.
PendingLoss launch_forward_backward(Sharded<models::LanguageModel>& model,
                                    const BatchSource& source, std::int64_t step,
                                    const std::vector<RowRange>& rows, const StepOptions& options);

/// The loss alone; a batch without an unmasked target adds nothing. Collective.
BatchLoss forward_only(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, const std::vector<RowRange>& rows,
                       PipelineOfRun* pipeline = nullptr);

/// In a handler of `error`: what libtorch says when memory ends names no key. Throws it again, or
/// kConfig naming key, rows, and where on a device it was.
[[noreturn]] void rethrow_with_key(const ShardedBase& model, const BatchSource& source,
                                   const std::vector<RowRange>& rows, const std::exception& error);

/// The same outside of forwards and backwards: an error of `kind` that says `when` memory ran out.
[[noreturn]] void rethrow_with_time(const World& world, ErrorKind kind, std::string_view when,
                                    const std::exception& error);
template <class Run>
auto in_memory_of(const World& world, ErrorKind kind, std::string_view when, const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    rethrow_with_time(world, kind, when, error);
  }
}

/// One micro-batch forward, without its result. Collective.
void run_once(Sharded<models::LanguageModel>& model, const BatchSource& source, std::int64_t step,
              RowRange rows, PipelineOfRun* pipeline = nullptr);
/// The logits of a micro-batch's rows, at the positions that this rank has of each.
struct LogitsOfRows {
  at::Tensor logits = {};                ///< [b, n, V]; undefined where another stage has them
  std::vector<layout::Range> positions;  ///< n in all, one range after the other
};
/// The logits of one micro-batch. Collective.
LogitsOfRows logits_of(Sharded<models::LanguageModel>& model, const BatchSource& source,
                       std::int64_t step, RowRange rows, PipelineOfRun* pipeline = nullptr);

/// A scaler where float16 is computed with, frozen parameters included (gradients pass through
/// them), or carries gradients; else none. `parameters`: of the whole model. Errors: kConfig for
/// options of a run that needs none.
std::unique_ptr<GradScaler> make_scaler(const ShardedBase& model,
                                        const std::vector<GradContract>& parameters,
                                        const GradScalerOptions& options);

}  // namespace tessera::train
