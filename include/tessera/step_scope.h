// StepScope: one step of a sharded model, of several stages and micro-batches.
//
// Inside it weights do not change. So ranks agree once, when it opens, on what it will run, instead
// of at each backward; units stay gathered over micro-batches where that is asked for; weight
// gradients are put off for the backwards that say so, and the others wait for none of them; a
// stage's gradients are reduced while other stages still compute, and shown by finish(). What a
// pipeline runner opens, and whoever accumulates over micro-batches may. Outside of one everything
// is as shard.h says. Not a schedule: it is told what comes next.
//
// The first scope of a schedule agrees as usual and records what each stage enters; later ones
// follow that, by a plan that is a value. [Note: step scope] in src/fsdp/runtime/open_step.h. Next:
// shard.h.
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
  kStep,        ///< from their first use in it until reshard() of their stage: one gather a step
  kMicroBatch,  ///< as reshard_after_forward says, for each forward and each backward
};

/// What a backward does with the weight gradients of layers that can form them later.
enum class Backward : std::uint8_t {
  kFull,       ///< forms them
  kInputOnly,  ///< leaves them to run_weight_gradients()
};

/// A forward and a backward as run_pair() runs them: whose they are, as begin_forward() and
/// begin_backward() are told, and what computes them.
struct StepForward {
  int stage = 0;
  std::int64_t micro_batch = 0;
  std::function<void()> run;
};
struct StepBackward {
  int stage = 0;
  std::int64_t micro_batch = 0;
  Backward backward = Backward::kFull;
  std::function<void()> run;
};

struct StepScopeOptions {
  StepReshard reshard = StepReshard::kStep;
  /// reduce() may come several times in a step, for what has arrived so far.
  bool sync_every_micro_batch = false;
  /// Names what this rank is going to run, as text or as a hash. The record of earlier steps is
  /// looked up by it: give steps that run the same the same name. All ranks of the stage have the
  /// same.
  std::string schedule = {};
  int stages = 1;  ///< of this rank, at most kMostStages
  /// How many this step has, of one stage, each with its backward (Backward::kFull) before the next
  /// one's forward. Then gradients are reduced while the last backward runs (every one, with
  /// sync_every_micro_batch), without a reduce(), and memory may stay from a forward to its
  /// backward. None: not known, in any order.
  std::optional<std::int64_t> micro_batches = std::nullopt;
  static constexpr int kMostStages = 64;
};

/// Errors of all calls: kUsage for what does not fit together (a stage or micro-batch that is not
/// there, twice, in the wrong order), naming both. Where a forward or backward leaves what was
/// recorded, or an exception leaves one, the step has failed on all ranks as after every failure
/// (World::recover()), and the next scope records anew. Threads: the rank's own.
class StepScope {
 public:
  /// Collective over the ranks of the pipeline stage (ShardedBase::data_group()). No forward may
  /// wait for its backward, and no other scope of the model may be open. Until finish() optimizer
  /// steps, norms, zero_grad() and every control of the model are refused (kUsage). Errors: kUsage
  /// naming the settings that differ between ranks; those of compile() for its plan (kConfig for a
  /// budget below the least). Nothing has begun then and the World is not aborted: once the cause
  /// is mended another scope may be opened, without recover(). Where the model is on a part of the
  /// World, as in a pipeline, whose other stages wait for this one, the World is aborted.
  explicit StepScope(ShardedBase& model, StepScopeOptions options = {});
  /// Without finish() the step has failed, as after an exception.
  ~StepScope();
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;

  /// Forwards from here to the next call are this stage's and micro-batch's: one of the outermost
  /// handle, or several of handles inside it, in the same order for every micro-batch. Stages are
  /// counted from 0 among this rank's. One a micro-batch and stage.
  void begin_forward(int stage, std::int64_t micro_batch);
  /// The next backward() goes through that forward, and through no other. Not towards chosen tensors
  /// alone (torch::autograd::grad): weight gradients would be missing.
  void begin_backward(int stage, std::int64_t micro_batch, Backward backward = Backward::kFull);
  /// A forward beside the backward of another micro-batch, or of another stage: while an exchange of
  /// experts of one is under way (with pipeline.overlap = "all" of a run also one of tensor parallel
  /// layers) the other one computes, on this thread and on a call stack of its own. Gradients and
  /// results have the bits of begin_forward() and begin_backward() in turn. It runs them in turn in a
  /// step that records, where ranks or micro-batches take other numbers of turns, where checkpoints
  /// draw random numbers of the process, and for a model that compile() plans. Neither function may
  /// wait for the other, nor call this scope; an exception of one ends both and comes out of here.
  /// Errors: kUsage with StepScopeOptions::micro_batches, which says that no forward comes before the
  /// last backward, and for calls of the scope inside of either function; kComm where a pass takes
  /// other turns than in the first step of its schedule. Collective.
  void run_pair(const StepForward& forward, const StepBackward& backward);
  /// Forms what the kInputOnly backward of this stage and micro-batch has left, oldest first.
  void run_weight_gradients(int stage, std::int64_t micro_batch);
  /// No forward and no backward of the stage comes any more: its parameters' memory is given back,
  /// that of units which another stage uses too with the last of them.
  void reshard(int stage);
  /// Its last weight gradient was formed: its units' gradients go out, in reverse of the order in
  /// which its forward enters them; nothing is waited for. Units which another stage uses too go
  /// out with the last of them. What was not reduced so is by finish(). Collective. Errors:
  /// kContract naming parameter, layer, stage and micro-batch for weight gradients that are owed
  /// (but with sync_every_micro_batch, where what is owed comes with a later call).
  void reduce(int stage);
  /// Waits for the reductions, sums over replicas and shows the gradients. Collective. All ranks of
  /// the stage refuse what one of them refuses, naming it; the step is open as before on each.
  /// Errors: kContract as reduce(), for any stage; kUsage for a forward without the backward that
  /// others of its stage had, for weights that were changed, for gradients on shards that were
  /// changed or cleared since it began; kComm where ranks have run different things.
  void finish();

  /// Whether this scope agrees at each backward, since nothing of its schedule was recorded yet, or
  /// micro-batches of a stage enter different units.
  bool records() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
