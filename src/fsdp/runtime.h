// Runtime: runs the units of one sharded tree, in an order that all ranks agree on.
//
// One per root handle. It follows forwards (gather, prefetch, release), backwards (gather, markers,
// reduce) and publishes gradients on the shards when the outermost backward ends. What the order is
// stands in order.h; what moves bytes in unit.h and bucket.h. Its parts: runtime.cpp (plan,
// forward, failure), controls.cpp (what users switch between steps), agree_backward.cpp (the list
// of what a backward issues), backward.cpp (walking through it), publish.cpp (what happens to
// gradients between two backwards).
//
// [Note: readiness] Gradients are never counted: parameters stay unused, hooks fire twice under
// recomputation, functions return undefined gradients. A unit's backward is over when a *marker*
// ran, an identity node at a grad-requiring input of its forward (call.cpp), or when
// backward has come to anything that was made before: autograd takes nodes in reverse of their
// making. So the agreed list says after which place a unit is reduced. Deferred gradients hold
// tickets: while gradients are deferred at all, every unit is reduced once no rank owes any.
//
// [Note: release] Unsharded memory goes back at the marker, never when the last gradient arrived:
// with a frozen base and adapters all gradients arrive before the base weight's last use.
//
// Threads: the rank's own (forward) and the one that runs its backward, never at the same time.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/queue.h"
#include "fsdp/agreement.h"
#include "fsdp/backward_plan.h"
#include "fsdp/living_nodes.h"
#include "fsdp/unit.h"
#include "fsdp/unit_trace.h"
#include "grad/weight_grad_store.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera::fsdp {

class Runtime;

struct Entry;

/// One forward of the root, as all ranks have it: the units that it entered. Kept until no rank has
/// a graph of it any more.
struct PastForward {
  std::uint32_t number = 0;
  Trace trace;
  bool forgotten = false;  ///< units have come or gone since: its numbers of them mean nothing now
};

/// What this rank has of it.
struct Segment {
  std::shared_ptr<PastForward> forward;
  std::uint64_t weights = 0;  ///< weights_now() when it began
  std::vector<std::weak_ptr<Entry>> entries;
  std::vector<std::shared_ptr<Unit>> units;  ///< of the whole tree: a graph may outlive the handles

  /// Changes whenever a shard of its units is written to.
  std::uint64_t weights_now() const;
};

/// One recorded forward of one unit. Lives as long as the autograd graph that it is part of.
struct Entry {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Unit> unit;
  std::shared_ptr<Segment> segment;
  std::size_t position = 0;
  std::uint64_t generation = 0;  ///< Runtime::generation() when it was made
  bool consumed = true;          ///< nothing waits for its backward
  /// Nodes that will run its backward, as far as they live: of each result, of each argument, and
  /// of the checkpoint that it ran in (null where there is none).
  LivingNodes at_results;
  LivingNodes at_arguments;
  std::atomic<const torch::autograd::Node*> checkpoint = nullptr;
  ~Entry();
  Entry() = default;
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

/// A backward under way: the outermost one, or one inside a node of it that it did not announce.
struct BackwardUnderWay {
  BackwardPlan plan;
  std::size_t done = 0;                                ///< of its steps
  std::map<std::uint32_t, std::vector<bool>> reached;  ///< by some rank, as BackwardView
  std::vector<std::shared_ptr<Segment>> segments;      ///< of this rank, as far as it goes through
  std::size_t passed = 0;                              ///< the last place that this rank came by
};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  Runtime(Mesh mesh, std::int64_t in_flight_bytes);
  ~Runtime();

  const Mesh& mesh() const { return mesh_; }
  World& world() { return *mesh_.world(); }
  comm::IssueQueue& queue() { return world().queue(); }
  const std::shared_ptr<comm::BufferPool>& pool() { return pool_; }
  grad::GradSink& sink() { return sink_; }
  /// What buckets of these axes communicate on. The first time: collective among those ranks.
  AxesGroups groups_of(const layout::BucketKey& key);
  at::Device device() const { return pool_->device(); }
  int shard_rank() const { return shard_rank_; }  ///< on the data axes
  layout::PlanOptions plan_options() const;
  /// All ranks of the pipeline stage, control; null for one.
  comm::Group* data_group() { return data_group_; }
  /// The ranks of one replica, control; null for one.
  comm::Group* replica_control() { return replica_control_.get(); }

  /// Units are numbered in the order of adding, the same on every rank.
  void add_unit(Unit* unit);
  /// Again: nothing happens.
  void remove_unit(Unit* unit);
  /// The unit takes part until the next forward of another handle of the tree, and not longer: a
  /// place that all ranks come by. A graph that one of them keeps holds its memory alone.
  void handle_is_gone(Unit& unit);
  const std::vector<Unit*>& units() const { return units_; }
  /// All ranks have the same contracts and plans. Collective. Errors: kContract naming the first
  /// difference.
  void agree_on_plan();
  /// All ranks of the stage have the same `lines`. Collective. Errors: kContract naming the first
  /// difference and the `mend`.
  void agree(const std::string& lines, const char* what, const char* mend);
  /// Gives all unsharded memory back before units are laid out anew. Nothing may be under way.
  void begin_relayout();
  /// Changes with every begin_relayout().
  std::uint64_t layout() const { return layout_; }

  // --- forward, called by Call (call.h) ---
  /// Makes the unit's parameters readable; null when nothing of it needs to be recorded.
  std::shared_ptr<Entry> enter_forward(Unit& unit);
  std::shared_ptr<Entry> enter_recompute(Unit& unit);
  /// Whether its memory goes back when the forward under way ends, whoever holds a tensor there.
  bool gives_back(const Unit& unit) const;
  void leave_forward(Unit& unit);
  /// An exception leaves a forward or a backward: nothing of the step can be used any more.
  void fail(const std::string& why);
  /// Changes with every failure: calls that began before it must not go on.
  std::uint64_t generation() const { return generation_; }

  // --- backward, called by the nodes of call.cpp ---
  /// `first`: what backward has come to, where it is a unit's forward. Agrees with the other ranks
  /// on what is issued, once a backward.
  void begin_backward(const Entry* first = nullptr);
  void end_backward();
  /// The backward that began at `generation` ended without end_backward().
  void abandon_backward(std::uint64_t generation);
  void pre_backward(Entry& entry);
  void post_backward(Entry& entry);
  void on_gradient();
  void on_tickets_closed();
  /// Its backward is owed, or finished: counted on its unit and on the units that hold its
  /// parameters.
  void expect(Entry& entry);
  void consume(Entry& entry);

  // --- user controls ---
  /// Final gradients are divided by it too: a power of two that losses are multiplied by. Errors:
  /// kUsage in the middle of a step, named `what`.
  void set_loss_scale(double scale, const char* what);
  double loss_scale() const { return loss_scale_; }
  void set_has_scaler(bool value) { has_scaler_ = value; }
  bool has_scaler() const { return has_scaler_; }
  /// Errors: kUsage where require_idle() throws, and while gradients wait to be reduced.
  void require_whole_sums(const char* what);
  /// The same, and for gradients on its shards: units are about to be laid out anew.
  void require_between_steps(const char* what);
  void set_requires_replica_reduce(bool value);
  bool requires_replica_reduce() const { return requires_replica_reduce_; }
  void set_is_last_backward(bool value);
  /// Errors: kUsage as require_idle().
  void set_defer_weight_gradients(bool value);
  void run_weight_gradients();
  /// To be called when anything in controls() may have changed.
  void controls_changed() { controls_known_ = false; }
  /// Every control that is not as the plan was agreed, in words; "" for none. It is part of every
  /// label and of the agreement on the forward order, so that ranks cannot differ. [Note: controls]
  const std::string& controls();
  /// The same behind the model's name, for labels: two models of one module issue the same.
  const std::string& marks();
  /// From here on labels have one; units of this tree are what all ranks have agreed on.
  void name_model() {
    model_ = world().next_model_name();
    controls_changed();
  }
  const std::string& model_name() const { return model_; }
  /// Starts the unit's gather for the user, and keeps it. Collective.
  void begin_unshard(Unit& unit);
  /// Waits until its gradients of earlier micro-batches are summed.
  void finish_reductions_of(const Unit& unit);
  /// Gradients can be read. Errors: kUsage while reductions wait for the last backward; as
  /// GradSink::require_all_redeemed.
  void require_reduced(const char* what) const;
  /// No rank has gradients that were deferred. Errors: kUsage.
  void require_none_owed(const char* what) const;
  /// No micro-batch waits to be reduced, nor to be summed over replicas. Errors: kUsage as
  /// require_reduced(); naming the unit.
  void require_synced(const char* what) const;
  /// Errors: kUsage where a failure took gradients and zero_grad() was not called since.
  void require_none_lost(const char* what) const;
  /// Errors: kUsage while a recorded forward waits for its backward or deferred gradients are owed.
  void require_idle(const char* what) const;
  /// An exception has ended a step, and nothing has begun anew since.
  bool has_failed() const;
  /// reset() after a failure that World::recover() has ended: first in whatever may follow one.
  void renew_after_failure();
  /// Gives back all unsharded memory and forgets everything under way, published gradients too.
  void reset();
  std::int64_t gathers_issued() const { return gathers_issued_; }
  std::int64_t reductions_issued() const { return reductions_issued_; }

 private:
  friend struct Entry;
  // plan and forward: runtime.cpp
  void check_usable();
  void remove_orphans();
  /// The first line in which `lines` differs between ranks, in words. Collective.
  std::string difference_between_ranks(const std::string& lines, const char* what);
  std::shared_ptr<Entry> record(Unit& unit, std::size_t position);
  void gather_needed(Unit& unit);
  std::uint32_t checkpoint_number();
  void prefetch_after(const Unit& unit, std::size_t position);
  void issue_gather(Unit& unit);
  void check_borrowed(const Unit& unit) const;
  // controls.cpp
  void release_stale();
  void agree_on_controls();
  std::vector<bool> stale_on_any_rank(const std::vector<Unit*>& kept);
  std::vector<UnitId> backward_prefetch_of(const Unit& unit) const;
  // what a backward issues: agree_backward.cpp
  BackwardView view_of_backward(const Entry* first) const;
  UnitState state_of(const Unit& unit) const;
  std::string memory_lines() const;
  ViewFrame frame_of_views() const;
  std::uint64_t hash_of_agreed() const;
  /// What any rank says. Collective. Errors: kComm for other traces.
  BackwardView agree_on_backward(const BackwardView& mine);
  [[noreturn]] void name_difference();
  void forget_forwards(const std::set<std::uint32_t>& alive);
  void keep_forward(const std::shared_ptr<Segment>& segment);
  void plan_backward_under_way(const Entry* first);
  // backward: backward.cpp
  [[noreturn]] void refuse_forgotten(const Entry& entry);
  BackwardUnderWay* under_way(const Entry& entry, bool needs_weights);
  void do_steps(BackwardUnderWay& backward, std::size_t count);
  void finish(BackwardUnderWay& backward);
  void wait_unsharded(Unit& unit);
  bool any_rank_owes();
  void issue_reduction(Unit& unit);
  /// Of its buckets on one group; null: those that have nobody to share with.
  void issue_reduction(Unit& unit, comm::Group* group);
  void finish_oldest_reduction();
  void settle_gradients();
  // between backwards: publish.cpp
  void agree_on_used();
  void publish();
  void leave_shown_sums(const Unit& unit, const comm::Group* group);
  void import_user_changes();
  void import_changed(Unit& unit, Parameter& parameter);

  Mesh mesh_;
  std::shared_ptr<comm::BufferPool> pool_;
  grad::GradSink sink_;
  grad::WeightGradStore store_{sink_};
  std::vector<std::pair<std::vector<std::string>, AxesGroups>> groups_;  // by shard axes
  comm::Group* replicas_ = nullptr;         // of one shard; null for one rank, as the others
  comm::Group* replica_gathers_ = nullptr;  // the ranks of one replica, in the queue
  std::shared_ptr<comm::Group> data_group_owner_, replica_control_, replica_gathers_owner_,
      replicas_owner_;
  comm::Group* data_group_ = nullptr;
  int shard_rank_ = 0;
  std::vector<Unit*> units_;
  std::vector<std::shared_ptr<Unit>> orphans_;  // without a handle, while others have one
  bool agreed_ = false;
  std::uint64_t layout_ = 0;

  // forward
  std::vector<std::size_t> open_;  // positions of the forwards on the stack
  std::uint32_t next_segment_ = 0;
  std::shared_ptr<Segment> current_;
  Trace reference_;  // the last trace that all ranks agreed on: what prefetch follows
  bool follows_reference_ = false;
  Unit* kept_ = nullptr;  // the reference's last unit, whose memory stays for backward
  struct Past {
    std::shared_ptr<PastForward> forward;
    std::weak_ptr<Segment> segment;
  };
  std::deque<Past> past_;  // those with a graph on some rank; the same on every rank
  static constexpr std::size_t kPastForwards = 1024;
  std::size_t past_limit_ = kPastForwards;  // when those without a graph are looked for
  std::uint64_t checkpoint_serial_ = 0;     // of the last checkpoint that units ran in
  std::uint32_t checkpoints_ = 0;

  // backward
  bool in_backward_ = false;
  bool failed_ = false;
  std::uint64_t generation_ = 0;
  std::uint64_t recoveries_ = 0;  // of the world, when this was last reset
  bool awaiting_tickets_ = false;
  bool holds_reductions_ = false;
  std::deque<BackwardUnderWay> under_way_;  // outermost first
  struct InFlight {
    Unit* unit;
    comm::Group* group;  // of the unit's buckets that it carries
    comm::Pending work;
    std::int64_t bytes;
  };
  std::deque<InFlight> in_flight_;
  std::int64_t bytes_in_flight_ = 0;
  std::int64_t bytes_budget_;
  bool requires_replica_reduce_ = true;
  double loss_scale_ = 1.0;
  bool has_scaler_ = false;
  bool rescaled_ = false;  // the sums that stand are of losses of another scale
  bool is_last_backward_ = true;
  bool waits_for_last_ = false;  // reductions are issued that no gradient shows yet
  bool controls_known_ = false;
  std::string controls_;
  std::string marks_;
  std::string model_ = "a model that is being sharded";
  UnitTrace spans_;
  int outstanding_ = 0;  // entries that are not consumed
  std::int64_t gathers_issued_ = 0;
  std::int64_t reductions_issued_ = 0;
};

}  // namespace tessera::fsdp
