// Forwards: the forwards of one sharded tree, as values: the one under way, those that a backward
// may still go through, and the one that prefetch follows.
//
// One forward of the root is a Trace (order.h), the same on every rank. This rank has a Segment of
// that forward as long as a graph of it lives here. The Segment has an Entry for each call of a
// unit that a backward may reach. Any number of forwards may wait for their backwards:
// micro-batches of a pipeline, a graph that the user keeps. Memory and collectives are in
// runtime.h.
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

/// The nodes of an autograd graph that still exist. After an exception in a backward, the device
/// thread that holds a node last destroys it, while the rank's thread may search the nodes of the
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
  /// Whether `holds(node)` is true of any node; no node is destroyed meanwhile.
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

/// The stage and micro-batch of an outermost forward inside a step scope (open_step.h).
struct InStep {
  std::uint64_t step = 0;  ///< OpenStep::number()
  int stage = 0;
  std::int64_t micro_batch = 0;
  std::size_t part = 0;  ///< index among the outermost forwards of the micro-batch
};

/// One forward of the root, the same on all ranks: the units that it entered. Kept until no rank
/// has a graph of it.
struct PastForward {
  std::uint32_t number = 0;
  Trace trace;
  std::optional<InStep> in_step;  ///< none: outside of a step
  bool forgotten = false;  ///< units have come or gone since, so that its unit numbers are invalid
};

using HeldUnits = std::shared_ptr<const std::vector<std::shared_ptr<Unit>>>;

/// Returns a number that changes whenever a shard of the units is written to.
std::uint64_t weights_of(const std::vector<std::shared_ptr<Unit>>& units);

/// This rank's part of a PastForward.
struct Segment {
  std::shared_ptr<PastForward> forward;
  std::uint64_t weights = 0;  ///< weights_now() when the forward began
  std::vector<std::weak_ptr<Entry>> entries;
  std::vector<bool> had_grad;  ///< by position of the trace: whether grad mode was on
  HeldUnits units;             ///< the units of the whole tree: a graph may outlive the handles

  std::uint64_t weights_now() const;
};

/// Counts as one pending backward while it lives. Threads: any. A graph is destroyed with its last
/// reference: on the rank's thread, on a thread to which the user gave the loss, or on a device
/// thread of autograd that has run the last node. So the destructor accesses nothing of the runtime
/// but counters, to which this object holds references.
class PendingBackward {
 public:
  using Count = std::shared_ptr<std::atomic<int>>;
  /// `owners`: counters of the units that own parameters of `unit`; there are rarely any.
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

/// One recorded forward of one unit. It lives as long as the autograd graph that it is part of.
struct Entry {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Unit> unit;
  std::shared_ptr<Segment> segment;
  std::size_t position = 0;
  std::uint64_t generation = 0;            ///< Runtime::generation() when it was made
  std::optional<PendingBackward> pending;  ///< none: nothing waits for its backward
  /// The living nodes that will run its backward: those of its results and arguments, and that of
  /// the checkpoint in which it ran (null: none).
  LivingNodes at_results;
  LivingNodes at_arguments;
  std::atomic<const torch::autograd::Node*> checkpoint = nullptr;
  Entry() = default;
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

class Forwards {
 public:
  /// A forward of which some rank has a graph; every rank has the same list.
  struct Past {
    std::shared_ptr<PastForward> forward;
    std::weak_ptr<Segment> segment;
  };

  // --- the forward under way ---
  bool is_open() const { return !open_.empty(); }
  /// Whether only the outermost unit is entered.
  bool is_outermost() const { return open_.size() == 1; }
  const std::shared_ptr<Segment>& current() const { return current_; }
  /// `weights`: weights_of() the units now.
  void begin(HeldUnits units, std::uint64_t weights);
  /// Enters the unit and returns the position of the call in the trace. `checkpoint`: the number,
  /// from 1, of the outermost checkpoint that the call runs in; 0 for none.
  std::size_t enter(UnitId unit, std::uint32_t checkpoint);
  /// Leaves the unit that was entered last and not left yet. Returns whether the forward has ended.
  bool leave();
  void end() { current_.reset(); }
  /// Ends what is under way, after an exception.
  void abandon();
  /// Numbers checkpoints in the order in which they first run, the same on every rank. `serial`:
  /// the checkpoint's serial number on this rank.
  std::uint32_t number_of_checkpoint(std::uint64_t serial);
  std::uint32_t checkpoints() const { return checkpoints_; }  ///< so far
  void add(const std::shared_ptr<Entry>& entry) { current_->entries.push_back(entry); }
  bool has_entries() const { return !current_->entries.empty(); }

  // --- the last trace that all ranks agreed on, which prefetch follows ---
  void follow(const Trace& trace) { reference_ = trace; }
  /// Returns the unit after `position` in that trace, as long as this forward has followed it.
  std::optional<UnitId> next_after(std::size_t position) const;
  /// Whether the last call so far is one of `unit`, and that trace ends with the same call.
  bool is_last(UnitId unit) const;

  // --- the forwards that a backward may go through ---
  const std::deque<Past>& past() const { return past_; }
  /// Whether so many are kept that those without a graph should be forgotten first.
  bool should_forget() const { return past_.size() >= limit_; }
  /// Forgets all but those in `alive` and the one under way.
  void forget_all_but(const std::set<std::uint32_t>& alive);
  /// Raises the limit of should_forget(), since forwards that have a graph stay.
  void forgot_what_it_could();
  /// Keeps the forward under way, when it has its first entry.
  void keep_current() { past_.push_back({current_->forward, current_}); }
  /// Forgets the forwards of a step scope that has ended, which no backward may go through any
  /// more.
  void forget_steps();
  /// Forgets all forwards, since units get other numbers.
  void forget_units();
  /// The number of forwards so far.
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
  std::uint64_t checkpoint_serial_ = 0;  // the last checkpoint that units ran in
  std::uint32_t checkpoints_ = 0;
};

}  // namespace tessera::fsdp
