// Test hooks: the only way for tests to change the library's behaviour. This list has all of them.
//
// A test sets a function for a place in the library, which then calls it until the Set is
// destroyed:
//
//   const test_hooks::Set held(test_hooks::before_checkpoint_write,
//                              [&](int rank, std::int64_t step) { ... });
//
// Nothing else sets one: no configuration, no environment, no call of include/tessera. Where none
// is set, a place costs one relaxed load, or one of a thread-local pointer. A hook belongs to the
// process, or to a thread, and not to a World: ranks that are threads share it, and a function
// tells them apart by its arguments. Pure: the types of the places are only named here. A new place
// is a line in the list below.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace at {
class Tensor;
}

namespace tessera {
struct GradContract;
class Mesh;
class ShardedBase;
}  // namespace tessera

namespace tessera::capture {
struct Program;
}

namespace tessera::comm {
struct Batch;
enum class EventEnd : std::uint8_t;
enum class EventSite : std::uint8_t;
class Group;
struct Label;
struct P2PTag;
}  // namespace tessera::comm

namespace tessera::models {
struct ModelInputs;
}

namespace tessera::nn {
struct AttentionMask;
struct ContextRows;
struct Documents;
enum class StatePart : std::uint8_t;
}  // namespace tessera::nn

namespace tessera::parallel {
struct ContextSite;
class Transition;
}  // namespace tessera::parallel

namespace tessera::pipeline {
struct Action;
}

namespace tessera::train {
struct MicroBatch;
struct ModelParts;
enum class RankSum : std::uint8_t;
}  // namespace tessera::train

namespace tessera::test_hooks {

/// A place that any thread may reach. Threads: any; calls under way finish after the Set is
/// destroyed.
template <class Call>
class Hook {
 public:
  using Function = std::function<Call>;

  /// Returns the function that is set, or null.
  std::shared_ptr<const Function> get() const {
    if (!is_set_.load(std::memory_order_relaxed)) return nullptr;
    const base::Lock lock(mutex_);
    return function_;
  }

 private:
  template <class>
  friend class Set;
  void put(std::shared_ptr<const Function> function) {
    const base::Lock lock(mutex_);
    is_set_.store(function != nullptr, std::memory_order_relaxed);
    function_ = std::move(function);
  }

  std::atomic<bool> is_set_ = false;
  mutable base::Mutex mutex_;
  std::shared_ptr<const Function> function_ TESSERA_GUARDED_BY(mutex_);
};

/// A place of one thread, which sets it for itself alone.
template <class Call>
class ThreadHook {
 public:
  using Function = std::function<Call>;

  /// Returns the function that this thread has set, or null.
  const Function* get() const { return function_; }

 private:
  template <class>
  friend class Set;
  void put(const std::shared_ptr<const Function>& function) { function_ = function.get(); }

  const Function* function_ = nullptr;
};

/// While it lives, the place calls `function`. A place has at most one at a time.
template <class Place>
class Set {
 public:
  Set(Place& place, typename Place::Function function)
      : place_(place),
        function_(std::make_shared<const typename Place::Function>(std::move(function))) {
    place_.put(function_);
  }
  ~Set() { place_.put(nullptr); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;

 private:
  Place& place_;
  const std::shared_ptr<const typename Place::Function> function_;
};

// comm: timings that correct code does not depend on, and an order that is detected.

/// In-process backend (comm/backends/in_process), on the issuing thread, before a rank's batch is
/// registered: may block to delay it. `rank`: of the World.
inline constinit Hook<void(int rank, const comm::Batch& batch)> before_issue;
/// In-process backend: whether a rank's results appear in its wait() and not before, so that code
/// that forgets to wait sees old data.
inline constinit Hook<bool()> deliver_at_wait;
/// In-process backend, messages (comm/p2p.h): the delay of a message once both ends are posted.
inline constinit Hook<std::chrono::microseconds(const comm::P2PTag& tag)> message_delay;
/// In-process backend, messages: whether sends are buffered, so that they end before their receives
/// are posted; code that relies on it hangs without.
inline constinit Hook<bool()> buffered_messages;
/// parallel/collectives.h: the least time from the issue of a collective of activations to its
/// arrival. A thread that waits for it sleeps until then; no thread is delayed before. `where` as
/// it is issued: "experts dispatch".
inline constinit Hook<std::chrono::microseconds(const std::string& where)> exchange_delay;
/// comm/queue.h, on the issuing thread, before a batch is issued: whether it is delayed until the
/// next one was issued (an injected reordering). Not for groups on devices, to which the caller
/// issues.
inline constinit Hook<bool(const comm::Group& group, const comm::Label& label)> hold_back;
/// Gloo backend (comm/backends/gloo/point_to_point.h), on the issuing thread: the batches that the
/// rank issues in place of one, each waited for before the next one; none: the caller continues as
/// if it were done. May block, or end the process.
inline constinit Hook<std::vector<comm::Batch>(const comm::Group& group, const comm::Batch& batch)>
    issues_instead;
/// comm/p2p.h, where an end of a message is posted: whether it is, or the caller continues as if it
/// were done. May block, or end the process.
inline constinit Hook<bool(const comm::P2PTag& tag, bool sends)> posts_message;

// kernels.

/// kernels/kernels.cpp: whether tensors of the CPU get the implementations that a device's get.
inline constinit Hook<bool()> kernels_of_devices;
/// The number of elements at a time where a tensor is processed in parts: rows_of_loss
/// (kernels/kernels.h), sums and quotients on devices (kernels/aten/optimizer.cpp), masters of
/// 16-bit shards. The real numbers are too large for tests.
inline constinit Hook<std::int64_t()> elements_at_a_time;

// Faults that checks have to find: the function's result replaces that of the place.

/// comm/stream.h: whether one half of an order between two streams is left out.
inline constinit Hook<bool(comm::EventSite site, comm::EventEnd end)> leaves_out_event;
/// parallel/transition.h, forward: the result on this rank, on the thread that runs the model.
inline constinit thread_local ThreadHook<at::Tensor(const parallel::Transition& of,
                                                    const at::Tensor& x)>
    transition_forward;
/// parallel/transition.h, backward: the gradient of its input.
inline constinit thread_local ThreadHook<at::Tensor(const parallel::Transition& of,
                                                    const at::Tensor& grad)>
    transition_backward;
/// sum_over_ranks of the step, the only sum over ranks that is neither a transition nor one of
/// gradients: the sum on this rank of every rank's values, by rank.
inline constinit thread_local ThreadHook<std::vector<double>(
    train::RankSum what, const std::vector<std::vector<double>>& of_ranks)>
    rank_sum;
/// The ranks over which numbers are added; null where that is this rank alone: for sum_over_ranks
/// the data ranks, for the gradient norm (fsdp/optim/clip.cpp) the stages of a pipeline.
inline constinit thread_local ThreadHook<comm::Group*(train::RankSum what, comm::Group* data)>
    data_ranks_of_sum;
inline constinit thread_local ThreadHook<comm::Group*(comm::Group* stages)> stages_of_norm;
/// The sum of the gradient norm over the ranks of a replica, from this rank's part; the group is
/// null where that is this rank alone.
inline constinit thread_local ThreadHook<double(double mine, comm::Group* replica)> sum_of_norm;
/// grad/sink.h, after a gradient was added: may write to the sum in its slot.
inline constinit Hook<void(const GradContract& contract, const at::Tensor& slot)> after_accept;
/// grad/sink.h, in place of forming a deferred weight gradient: `hand_in` forms it, each time that
/// the test calls it while the sink lives.
inline constinit thread_local ThreadHook<void(const std::string& parameter,
                                              const std::function<void()>& hand_in)>
    hands_in;
/// capture/replay/region_call.cpp, when a region's program was made from its first recording,
/// before it is compared with later ones: may change it.
inline constinit Hook<void(capture::Program& program)> made_program;
/// capture/replay/blocks.h, when a region in `unit` takes memory: its address.
inline constinit thread_local ThreadHook<void(const std::string& unit, const void* block)>
    took_block;
/// nn/state/state_part.h: the beginnings of documents for a part of a layer with a state, on the
/// thread that runs the model.
inline constinit thread_local ThreadHook<at::Tensor(nn::StatePart part, const at::Tensor& starts)>
    starts_of_state;
/// Context parallelism, on the thread that runs the model. models/context/context_inputs.h: the
/// rows that a forward goes by. nn/attention/context_attention.h: the mask of whole rows, which may
/// be changed. parallel/context_exchange.h: what an exchange takes or gives, which may be changed.
inline constinit thread_local ThreadHook<std::shared_ptr<const nn::ContextRows>(
    const models::ModelInputs& batch, const std::shared_ptr<const nn::ContextRows>& rows)>
    context_rows;
inline constinit thread_local ThreadHook<void(nn::AttentionMask& mask,
                                              const nn::Documents& documents)>
    context_mask;
inline constinit thread_local ThreadHook<void(const parallel::ContextSite& site,
                                              std::vector<at::Tensor>& tensors)>
    context_exchange;
/// train/parallelize.h, on each rank: the parts that model_parts() has made, which may be changed,
/// and the model that parallelize() has made of them.
inline constinit Hook<void(const Mesh& mesh, train::ModelParts& parts)> made_parts;
inline constinit Hook<void(const Mesh& mesh, ShardedBase& model)> made_parallel;
/// train/step.cpp, on each rank: a micro-batch that it is about to compute, whose tensors may be
/// written to.
inline constinit Hook<void(const Mesh& mesh, const train::MicroBatch& batch)> took_micro_batch;
/// pipeline/borders.h: the tag that a message is sent with; its other end waits for `tag`.
inline constinit Hook<comm::P2PTag(const comm::P2PTag& tag)> sent_tag;

// Pipelines.

/// pipeline/runner.h: an action of this rank begins, or has ended (null), on the thread that runs
/// the stages.
inline constinit thread_local ThreadHook<void(const pipeline::Action* action)> computing;

// Checkpoints.

/// On the writer's thread, before it writes `rank`'s file: may delay it.
inline constinit Hook<void(int rank, std::int64_t step)> before_checkpoint_write;

}  // namespace tessera::test_hooks
