// Forwards: the forwards of one sharded tree, as values: what is under way, what backward may still
// go through, and the one that prefetch follows.
//
// One forward of the root is a Trace (order.h), the same on every rank; this rank has a Segment of
// it while any graph of it lives here, with one Entry for each call of a unit that backward may
// come to. Any number of them may wait for their backwards: micro-batches of a pipeline, a graph
// that somebody keeps. Knows no memory and no collective: runtime.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "fsdp/agreed/order.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace tessera::fsdp {

/// Nodes of an autograd graph, as far as they live. Where an exception ends a backward, nodes go in
/// whichever device's thread holds them last, while the rank's thread may look for others of the
/// same forward. Threads: any.
class LivingNodes {
 public:
  using Node = torch::autograd::Node;
  void add(const Node* node) {
    const base::Lock lock(mutex_);
    nodes_.push_back(node);
  }
  void remove(const Node* node) {
    const base::Lock lock(mutex_);
    std::erase(nodes_, node);
  }
  /// Whether `holds(node)` is true of one; none of them goes in the meantime.
  template <class Holds>
  bool any(const Holds& holds) const {
    const base::Lock lock(mutex_);
    return std::any_of(nodes_.begin(), nodes_.end(), holds);
  }

 private:
  mutable base::Mutex mutex_;
  std::vector<const Node*> nodes_ TESSERA_GUARDED_BY(mutex_);
};

class Runtime;
class Unit;
struct Entry;

/// Whose an outermost forward inside a step scope is (open_step.h).
struct InStep {
  std::uint64_t step = 0;  ///< of the runtime, counted
  int stage = 0;
  std::int64_t micro_batch = 0;
  std::size_t part = 0;  ///< among the outermost forwards of the micro-batch
};

/// One forward of the root, as all ranks have it: the units that it entered. Kept until no rank has
/// a graph of it any more.
struct PastForward {
  std::uint32_t number = 0;
  Trace trace;
  std::optional<InStep> in_step;  ///< none: outside of one
  bool forgotten = false;  ///< units have come or gone since: its numbers of them mean nothing now
};

using HeldUnits = std::shared_ptr<const std::vector<std::shared_ptr<Unit>>>;

/// Changes whenever a shard of these is written to.
std::uint64_t weights_of(const std::vector<std::shared_ptr<Unit>>& units);

/// What this rank has of it.
struct Segment {
  std::shared_ptr<PastForward> forward;
  std::uint64_t weights = 0;  ///< weights_now() when it began
  std::vector<std::weak_ptr<Entry>> entries;
  std::vector<bool> had_grad;  ///< by position of the trace: it ran with grad mode on
  HeldUnits units;             ///< of the whole tree: a graph may outlive the handles

  std::uint64_t weights_now() const;
};

/// A backward that is owed, counted as long as this lives. Threads: any. A graph ends where its
/// last reference does: on the rank's thread, on one to which a user gave the loss, on a device's
/// thread of autograd that has run the last node. So nothing of the runtime is accessed but
/// counters, which outlive it where they must.
class PendingBackward {
 public:
  using Count = std::shared_ptr<std::atomic<int>>;
  /// Counted on the model, on the unit and on those that lend it parameters: rarely any.
  PendingBackward(Count model, Count unit, std::vector<Count> owners)
      : model_(std::move(model)), unit_(std::move(unit)), owners_(std::move(owners)) {
    add(1);
  }
  ~PendingBackward() { add(-1); }
  PendingBackward(const PendingBackward&) = delete;
  PendingBackward& operator=(const PendingBackward&) = delete;

 private:
  void add(int number) {
    *model_ += number;
    *unit_ += number;
    for (const auto& owner : owners_) *owner += number;
  }

  const Count model_, unit_;
  const std::vector<Count> owners_;
};

/// One recorded forward of one unit. Lives as long as the autograd graph that it is part of.
struct Entry {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Unit> unit;
  std::shared_ptr<Segment> segment;
  std::size_t position = 0;
  std::uint64_t generation = 0;            ///< Runtime::generation() when it was made
  std::optional<PendingBackward> pending;  ///< none: nothing waits for its backward
  /// Nodes that will run its backward, as far as they live: of each result, of each argument, and
  /// of the checkpoint that it ran in (null where there is none).
  LivingNodes at_results;
  LivingNodes at_arguments;
  std::atomic<const torch::autograd::Node*> checkpoint = nullptr;
  Entry() = default;
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

class Forwards {
 public:
  /// One that some rank has a graph of; the same ones on every rank.
  struct Past {
    std::shared_ptr<PastForward> forward;
    std::weak_ptr<Segment> segment;
  };

  // --- the forward under way ---
  bool is_open() const { return !open_.empty(); }
  /// Inside the outermost unit alone.
  bool is_outermost() const { return open_.size() == 1; }
  const std::shared_ptr<Segment>& current() const { return current_; }
  /// `weights`: weights_of() these now.
  void begin(HeldUnits units, std::uint64_t weights);
  /// Returns the position in its trace. `checkpoint`: the outermost one that it runs in, counted
  /// from 1; 0 for none.
  std::size_t enter(UnitId unit, std::uint32_t checkpoint);
  /// The unit that was entered last and not left yet. Returns whether the forward is over.
  bool leave();
  void end() { current_.reset(); }
  /// After an exception: nothing is under way.
  void abandon();
  /// Counts checkpoints as they run for the first time, by their serial numbers: the same number
  /// on every rank.
  std::uint32_t number_of_checkpoint(std::uint64_t serial);
  std::uint32_t checkpoints() const { return checkpoints_; }  ///< so far
  void add(const std::shared_ptr<Entry>& entry) { current_->entries.push_back(entry); }
  bool has_entries() const { return !current_->entries.empty(); }

  // --- the last trace that all ranks agreed on: what prefetch follows ---
  void follow(const Trace& trace) { reference_ = trace; }
  /// The unit that comes after `position`, as long as the forward is as the last one was.
  std::optional<UnitId> next_after(std::size_t position) const;
  /// Whether its last call was the last one of the forward that it follows.
  bool is_last(UnitId unit) const;

  // --- those that backward may go through ---
  const std::deque<Past>& past() const { return past_; }
  /// So many that those without a graph should be forgotten first.
  bool should_forget() const { return past_.size() >= limit_; }
  /// All but those of `alive` and the one under way.
  void forget_all_but(const std::set<std::uint32_t>& alive);
  void forgot_what_it_could();
  /// The forward under way, from its first entry on.
  void keep_current() { past_.push_back({current_->forward, current_}); }
  /// Of a step scope that is over: nothing may go through them any more.
  void forget_steps();
  /// Units are numbered anew.
  void forget_units();
  /// How many there were.
  std::uint32_t count() const { return count_; }

 private:
  static constexpr std::size_t kKept = 1024;

  std::vector<std::size_t> open_;  // positions of the calls on the stack
  std::shared_ptr<Segment> current_;
  std::uint32_t count_ = 0;
  Trace reference_;
  bool follows_ = false;
  std::deque<Past> past_;
  std::size_t limit_ = kKept;
  std::uint64_t checkpoint_serial_ = 0;  // of the last checkpoint that units ran in
  std::uint32_t checkpoints_ = 0;
};

}  // namespace tessera::fsdp
