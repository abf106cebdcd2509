// StepScope: one step of a sharded model, with several micro-batches and stages.
//
// Weights do not change inside a scope. So ranks agree on its work once, when it opens, instead of
// at each backward; units may stay gathered over micro-batches; chosen backwards defer their weight
// gradients; and a stage's gradients are reduced while other stages still compute, and shown by
// finish(). A pipeline opens a scope for each step, and a program that accumulates over
// micro-batches may. Without a scope shard.h applies. A scope is no schedule: the caller tells it
// what comes next.
//
// The first scope of a schedule agrees at each backward and records the units that each stage
// enters. Later scopes follow this record, by a plan that is a value. [Note: step scope] in
// src/fsdp/runtime/open_step.h. Next: shard.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace tessera {

class ShardedBase;

/// How long a unit's parameters stay gathered inside a step.
enum class StepReshard : std::uint8_t {
  kStep,        ///< from their first use until reshard() of their stage: one gather a step
  kMicroBatch,  ///< by reshard_after_forward, for each forward and each backward
};

/// Whether a backward forms the weight gradients of layers that can defer them.
enum class Backward : std::uint8_t {
  kFull,       ///< it forms them
  kInputOnly,  ///< it defers them to run_weight_gradients()
};

/// A forward for run_pair().
struct StepForward {
  int stage = 0;                 ///< as begin_forward() takes it
  std::int64_t micro_batch = 0;  ///< as begin_forward() takes it
  std::function<void()> run;     ///< computes it
};
/// A backward for run_pair().
struct StepBackward {
  int stage = 0;                        ///< as begin_backward() takes it
  std::int64_t micro_batch = 0;         ///< as begin_backward() takes it
  Backward backward = Backward::kFull;  ///< as begin_backward() takes it
  std::function<void()> run;            ///< computes it
};

/// Options of a StepScope.
struct StepScopeOptions {
  StepReshard reshard = StepReshard::kStep;  ///< how long parameters stay gathered
  /// Lets reduce() run several times in a step, each time for the gradients that have arrived.
  bool sync_every_micro_batch = false;
  /// Names the work of this rank in the step, as text or as a hash; the record of earlier steps is
  /// looked up by it. Steps with equal work have equal names. The same on all ranks of the stage.
  std::string schedule = {};
  int stages = 1;  ///< number of stages of this rank, at most kMostStages
  /// Number of micro-batches of a step with one stage, where each backward (Backward::kFull) comes
  /// before the next forward. Then gradients are reduced while the last backward runs (with
  /// sync_every_micro_batch, while each runs) without a reduce(), and memory may stay from a
  /// forward to its backward. none = not known, in any order.
  std::optional<std::int64_t> micro_batches = std::nullopt;
  static constexpr int kMostStages = 64;  ///< bound of `stages`
};

/// A step that is open on this rank; finish() ends it.
///
/// Errors of all calls: kUsage for calls that contradict each other (a stage or micro-batch that
/// does not exist, comes twice, or comes in the wrong order), naming both. Where a forward or
/// backward departs from the record, or an exception leaves one, the step has failed on all ranks
/// (World::recover()), and the next scope records again. Threads: the rank's thread.
class StepScope {
 public:
  /// Opens a step. No forward waits for its backward, and no other scope of the model is open.
  /// Until finish() optimizer steps, norms, zero_grad() and every set_ function of the model are
  /// refused (kUsage). Collective among the ranks of the pipeline stage
  /// (ShardedBase::data_group()). Errors: kUsage naming the settings that differ between ranks;
  /// those of compile() for its plan (kConfig for a budget below the least). After an error nothing
  /// has begun, and another scope may be opened without recover(); only where the model is on a
  /// part of the World, as in a pipeline, whose other stages wait for this one, the World is
  /// aborted.
  explicit StepScope(ShardedBase& model, StepScopeOptions options = {});
  /// Ends a step; without finish() before, the step has failed, as after an exception.
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

  /// Assigns the forwards up to the next call to this stage and micro-batch: one forward of the
  /// outermost handle, or several of inner handles in the same order for every micro-batch. Stages
  /// of this rank are counted from 0. Call it once for each micro-batch and stage.
  void begin_forward(int stage, std::int64_t micro_batch);
  /// Assigns the next backward() to this stage and micro-batch; it goes through their forward and
  /// no other. A backward towards chosen tensors alone (torch::autograd::grad) would miss weight
  /// gradients.
  void begin_backward(int stage, std::int64_t micro_batch, Backward backward = Backward::kFull);
  /// Runs a forward together with the backward of another micro-batch or stage: one computes while
  /// the other waits for an exchange of experts (with the run's pipeline.overlap = "all" also for
  /// an exchange of tensor parallel layers), on this thread with a call stack for each. Gradients
  /// and results have the bits of begin_forward() and begin_backward() one after the other. They do
  /// run one after the other in a step that records, where ranks or micro-batches exchange
  /// different numbers of times, where checkpoints draw random numbers of the process, and for a
  /// model that compile() plans. Neither function may wait for the other or call this scope. An
  /// exception of one ends both and leaves this call. Collective. Errors: kUsage with
  /// StepScopeOptions::micro_batches, and for calls of the scope inside of either function; kComm
  /// where a pass exchanges in another order than in the first step of its schedule.
  void run_pair(const StepForward& forward, const StepBackward& backward);
  /// Forms the weight gradients that the kInputOnly backward of this stage and micro-batch has
  /// deferred, oldest first.
  void run_weight_gradients(int stage, std::int64_t micro_batch);
  /// Frees the gathered parameters of a stage after its last forward and backward. Units that
  /// several stages use are freed with the last of them.
  void reshard(int stage);
  /// Starts to reduce the gradients of a stage after its last weight gradient, in reverse order of
  /// its forward's units, and does not wait. Units that several stages use are reduced with the
  /// last of them. finish() reduces all others. Collective. Errors: kContract naming parameter,
  /// layer, stage and micro-batch for pending weight gradients; with sync_every_micro_batch these
  /// are left to a later call.
  void reduce(int stage);
  /// Waits for the reductions, sums over replicas and shows the gradients. Where one rank of the
  /// stage refuses, all refuse with its error, and the step stays open. Collective. Errors:
  /// kContract as reduce(), for any stage; kUsage for a forward without a backward where others of
  /// its stage had one, for weights that were changed, and for gradients on shards that were
  /// changed or cleared since the step began; kComm where ranks have run different calls.
  void finish();

  /// Returns whether this scope agrees at each backward, because its schedule has no record yet or
  /// micro-batches of a stage enter different units.
  bool records() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
