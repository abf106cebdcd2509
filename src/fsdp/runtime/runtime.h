// Runtime: runs the units of one sharded tree, in an order that all ranks agree on.
//
// One per root handle. It follows forwards (gather, prefetch, release), backwards (gather, markers,
// reduce) and publishes gradients on the shards when the outermost backward ends. What it works
// with are values and executors of their own: controls.h (what users switch), forwards.h (what was
// run), order.h and pass.h (what a backward issues), reducer.h, publisher.h, unit.h and bucket.h
// (what moves bytes). Its own parts: runtime.cpp (units, forward, failure), backward.cpp (what
// ranks agree on when one begins, and its end), pass.cpp (what the actions do). What is different
// inside a step scope is in open_step.h.
//
// A PassPlan says what a forward or backward does. One planner (pass_planner.h) writes all of them
// and advance() runs them. A step that follows a record has its plans when it begins. In a step
// that records, and outside of a step, a plan is made when a backward begins and ranks have agreed
// on what it goes through; such a backward may have others inside it (BackwardUnderWay). A forward
// that is not known beforehand has no plan: it gathers each unit where it enters it.
//
// [Note: readiness] Gradients are never counted: parameters stay unused, hooks fire twice under
// recomputation, functions return undefined gradients. A unit's backward is over when a *marker*
// ran, an identity node at a grad-requiring input of its forward (call.cpp), or when
// backward has come to anything that was made before: autograd takes nodes in reverse of their
// making. So the agreed list says after which place a unit is reduced. Deferred gradients hold
// tickets: while gradients are deferred at all, every unit is reduced once no rank owes any. Those
// that a backward leaves for one of its exchanges are formed before the next marker has run.
//
// [Note: release] Unsharded memory goes back at the marker, never when the last gradient arrived:
// with a frozen base and adapters all gradients arrive before the base weight's last use.
//
// Threads: the rank's own (forward) and the one that runs its backward, never at the same time. But
// where graphs end, others come by: whoever drops the last reference to one (Owed), and, after an
// exception, a device's thread of autograd that lets go of the graph task when the rank's thread
// has left with the error already, and may be in its next forward. It aborts the World, which any
// thread may, and leaves a note (abandon_backward); what the runtime owns, the rank's thread drops
// where it comes by next (take_up_abandoned).
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/buffer_pool.h"
#include "comm/queue.h"
#include "comm/turns.h"
#include "fsdp/agreed/controls.h"
#include "fsdp/agreed/known_steps.h"
#include "fsdp/runtime/bucket.h"
#include "fsdp/runtime/forwards.h"
#include "fsdp/runtime/open_step.h"
#include "fsdp/runtime/pass.h"
#include "fsdp/runtime/publisher.h"
#include "fsdp/runtime/reducer.h"
#include "fsdp/runtime/repeated_calls.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/runtime/unit_trace.h"
#include "grad/region.h"
#include "grad/sink.h"
#include "tessera/mesh.h"
#include "tessera/world.h"

namespace tessera::fsdp {

inline constexpr auto kAbandoned = "an exception left a backward through sharded modules";

// What a backward refuses by itself, and a step scope at its end. `difference`: the first one
// between ranks, in words.
std::string calls_differ(const std::string& what, const std::string& difference);
std::string units_differ(const std::string& difference);

/// A backward under way: the outermost one, or one inside a node of it that it did not announce.
struct BackwardUnderWay {
  Pass pass;
  std::vector<std::uint32_t> forwards;  ///< numbers of those that it goes through: its parts
  std::vector<Reach> reached;           ///< of each, by some rank
  std::vector<PassedPlace> places;      ///< in their order
  std::size_t passed = 0;               ///< the last one that this rank came by
  std::vector<std::shared_ptr<Segment>> segments;  ///< of this rank, as far as it goes through

  /// Returns the entry's index among the parts, or their number where it is in none.
  std::size_t part_of(const Entry& entry) const;
  /// Looks from `passed` on. Returns the end of `places` where this rank is past the place.
  std::vector<PassedPlace>::const_iterator find(const PassedPlace& place) const;
  void come_by(const PassedPlace& place);
};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// `in_flight_bytes` as ShardOptions has it.
  Runtime(Mesh mesh, std::optional<std::int64_t> in_flight_bytes);
  ~Runtime();

  const Mesh& mesh() const { return groups_.mesh(); }
  World& world() const { return groups_.world(); }
  comm::IssueQueue& queue() { return world().queue(); }
  const std::shared_ptr<comm::BufferPool>& pool() { return pool_; }
  /// The memory of gradients goes back to the allocator once all of a bucket's are cleared, as it
  /// does on a device. Else the host keeps it for the next step, since new pages cost more.
  void free_gradients() { gives_gradients_back_ = true; }
  bool gives_gradients_back() const { return gives_gradients_back_; }
  grad::GradSink& sink() { return sink_; }
  Groups& groups() { return groups_; }
  comm::Group* data_group() const { return groups_.data(); }
  at::Device device() const { return pool_->device(); }
  layout::PlanOptions plan_options() const;

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
  /// difference and the `hint`.
  void agree(const std::string& lines, const char* what, const char* hint);
  /// Gives all unsharded memory back before units are laid out anew. Nothing may be under way.
  void begin_relayout();
  /// Changes with every begin_relayout().
  std::uint64_t layout() const { return layout_; }

  // --- forward, called by Call (call.cpp) ---
  /// Errors: kComm after a failure that World::recover() has not ended.
  void require_recovered() const;
  /// Makes the unit's parameters readable; null when nothing of it needs to be recorded.
  std::shared_ptr<Entry> enter_forward(Unit& unit);
  std::shared_ptr<Entry> enter_recompute(Unit& unit);
  /// A forward inside a backward, which has to repeat a recorded one (repeated_calls.h): makes the
  /// unit's parameters readable, and records nothing. Returns false where it is a forward without
  /// grad mode and the backward is none of this model: an ordinary forward. Errors: kUsage, on all
  /// ranks.
  bool enter_repeated(Unit& unit);
  void leave_repeated(Unit& unit);
  /// Whether its memory goes back when the forward under way ends, whoever holds a tensor there.
  bool reshards_after(const Unit& unit) const;
  void leave_forward(Unit& unit);
  /// A forward is under way, and no unit inside the outermost one.
  bool is_in_outermost() const { return forwards_.is_outermost(); }
  /// An exception leaves a forward or a backward: nothing of the step can be used any more.
  void fail(const std::string& why);
  /// Changes with every failure: calls that began before it must not go on.
  std::uint64_t generation() const { return generation_; }

  // --- backward, called by the nodes of call.cpp ---
  /// `first`: what backward has come to, where it is a unit's forward. Agrees with the other ranks
  /// on what is issued, once a backward.
  void begin_backward(const Entry* first = nullptr);
  void end_backward();
  /// The backward that began at `generation`, when the World's recoveries() were `epoch`, ended
  /// without end_backward(). Again, or once the rank has begun anew: nothing happens. Threads: any.
  void abandon_backward(std::uint64_t generation, std::uint64_t epoch);
  void pre_backward(Entry& entry);
  void post_backward(Entry& entry);
  void on_gradient();
  void on_tickets_closed();
  /// Its backward is owed: counted here, on its unit and on the units that hold its parameters.
  void expect(Entry& entry);

  // --- steps, called by StepScope (step_scope.h) ---
  /// Collective. As StepScope's constructor.
  std::shared_ptr<OpenStep> open_step(StepScopeOptions options);
  /// Fails a step whose scope ends without finish(). Does nothing where the step is over.
  void give_up(const OpenStep& step);

  // --- called by the step that is open (open_step.h) ---
  /// Whether nothing has ended the step. Threads: the rank's own.
  bool is_open(const OpenStep& step);
  bool is_in_backward() const { return in_backward_; }
  bool is_under_way() const { return in_backward_ || forwards_.is_open(); }
  Forwards& forwards() { return forwards_; }
  grad::WeightGradStore& store() { return store_; }
  grad::WeightGradStore& under_exchange() { return under_exchange_; }
  comm::Turns& turns();
  /// Says once on rank 0 why forwards do not run beside backwards.
  void warn_of_no_pairs(const std::string& why);
  StepPlanning& planning() { return planning_; }
  HeldUnits held_units() const;
  PlanUnit plan_unit(const Unit& unit) const;  ///< what the plan of a pass says of it
  std::string memory_lines() const;            ///< what is unsharded, in words
  /// Begins the sums of a backward or a step, of which nothing is reduced yet.
  void begin_sums();
  void import_user_changes() { publisher_.import_user_changes(switches_); }
  /// Returns what any rank's backward goes through, and forgets forwards of which no rank has a
  /// graph. Collective. Errors: kComm for other traces; kUsage for parameters that were changed
  /// since a forward that this rank's backward goes through.
  BackwardView agree_on_backward(const Entry* first);
  /// Begins a unit's forward or backward: makes its parameters readable, then runs the actions that
  /// overlap with its computation.
  void begin_place(Pass& pass, const PlanPlace& place, Unit& unit);
  /// Runs the actions of the pass up to `count`, in their order.
  void advance(Pass& pass, std::size_t count);
  /// Reduces the unit's gradients. `is_shown_next`: they are published before any other sum.
  void reduce(Unit& unit, bool is_shown_next);
  void leave_backward();
  /// Requires gradients as they were published, but for what zero_grad() did. Errors: kUsage.
  void require_as_seen(const char* what) const { publisher_.require_as_seen(what); }
  /// Reduces the pending gradients and those of the units that `accessed` names, and publishes all.
  void settle(const std::vector<bool>& dirty);
  /// Keeps the record for later steps, unless micro-batches of a stage differ.
  void know_step(const KnownSteps::Schedule& schedule, StepRecord record, StepTurns turns);
  /// Ends the step scope, if one is open: finished, failed or left.
  void end_scope();

  // --- user controls ---
  /// Final gradients are divided by it too: a power of two that losses are multiplied by. Errors:
  /// kUsage in the middle of a step, named `what`.
  void set_loss_scale(double scale, const char* what);
  double loss_scale() const { return switches_.loss_scale; }
  void set_has_scaler(bool value) { has_scaler_ = value; }
  bool has_scaler() const { return has_scaler_; }
  /// Errors: kUsage where require_idle() throws, and while gradients wait to be reduced.
  void require_whole_sums(const char* what);
  /// The same, and for gradients on its shards: units are about to be laid out anew.
  void require_between_steps(const char* what);
  void set_requires_replica_reduce(bool value);
  void set_is_last_backward(bool value);
  /// Errors: kUsage as require_idle().
  void set_defer_weight_gradients(bool value);
  void run_weight_gradients();
  /// To be called when anything in controls() may have changed.
  void controls_changed() { controls_known_ = false; }
  /// As they are now.
  Controls controls() const;
  /// What replays regions of the model from here on; null: nobody. Errors: kUsage in a step.
  void set_regions(std::shared_ptr<grad::Regions> regions);
  const std::shared_ptr<grad::Regions>& regions() const { return regions_; }
  /// By which the plans of step scopes are made from here on. Errors: kUsage in a step.
  /// `while_recording`: of what a plan may tell, in steps that have none yet.
  void set_planner(Planner planner, RecomputeMode while_recording);
  /// Before units go to another runtime, which plans and replays nothing of this one. Errors: kUsage
  /// where there is a planner, or regions are replayed.
  void require_not_compiled(const std::string& what) const;
  std::vector<PlanUnit> plan_units() const;  ///< as they are now
  /// Of the last step scope that followed one; null: none has.
  const std::shared_ptr<const StepPlan>& followed_plan() const { return planning_.followed; }
  /// By unit: what its user has said, or kNone.
  std::vector<RecomputeMode> own_recompute() const;
  /// By unit: of the step that begins, until end_following().
  void follow_recompute(const std::vector<RecomputeMode>& modes);
  void end_following();
  const std::vector<RecomputeMode>& followed_recompute() const { return followed_; }
  /// The same in words. It is part of every label and of the agreement on the forward order, so
  /// that ranks cannot differ. [Note: controls]
  const std::string& controls_as_text();
  /// The same behind the model's name, for labels: two models of one module issue the same. Inside
  /// a step the stage is named, too.
  const std::string& marks();
  /// From here on labels have one; units of this tree are what all ranks have agreed on.
  /// Collective where there are pipeline stages.
  void name_model();
  const std::string& model_name() const { return model_; }
  /// Starts the unit's gather for the user, and keeps it. Collective.
  void begin_unshard(Unit& unit);
  void wait_unshard(Unit& unit);
  /// Until its slots may be used again, which a reduction of an earlier micro-batch has taken.
  void free_slots_of(const Unit& unit) { reducer_.free_wires(unit); }
  /// Publisher::forget_cleared(), where no backward is under way: after zero_grad(), and before the
  /// next forward's activations, since an optimizer of torch::optim clears gradients by itself.
  void forget_cleared();
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
  /// No step scope is open. Errors: kUsage.
  void require_no_step(const char* what) const;
  /// An exception has ended a step, and nothing has begun anew since.
  bool has_failed() const;
  /// reset() after a failure that World::recover() has ended: first in whatever may follow one.
  void renew_after_failure();
  /// Gives back all unsharded memory and forgets everything under way, published gradients too.
  void reset();
  /// handle.h.
  std::string last_entered() const;
  void are_read(const comm::Event& end);
  void order_after_reads();
  std::int64_t gathers_issued() const { return gathers_issued_; }
  std::int64_t reductions_issued() const { return reducer_.issued(); }

 private:
  /// A step that failed: nothing of it is under way any more.
  void end_step();
  /// What abandon_backward() has noted. Threads: the rank's own.
  void take_up_abandoned();
  // units and forward: runtime.cpp
  void check_usable();
  void number_units();
  void remove_orphans();
  /// The first line in which `lines` differs between ranks, in words. Collective.
  std::string difference_between_ranks(const std::string& lines, const char* what);
  std::shared_ptr<Entry> record(Unit& unit, std::size_t position);
  /// Who issues the gathers of a unit: the call itself, or a plan that has.
  enum class Gathers : std::uint8_t { kHere, kByPlan };
  void make_readable(Unit& unit, Gathers gathers);
  void prefetch_after(const Unit& unit, std::size_t position);
  [[noreturn]] void refuse_repeated(const Unit& unit, const std::string& found_and_remedy);
  void require_repeats(const Unit& unit);
  void gather_again(Unit& unit);
  bool backward_goes_through_this() const;
  std::vector<std::shared_ptr<Segment>> segments_under_way() const;
  void issue_gather(Unit& unit, std::uint32_t number);
  std::uint32_t number_of_forward() const;
  void check_shared(const Unit& unit) const;
  void leave_shards() const;
  void release_leftovers();
  void release_stale();
  std::vector<bool> stale_on_any_rank(const std::vector<Unit*>& kept);
  void agree_on_controls();
  std::vector<std::shared_ptr<Unit>> living(const std::vector<std::weak_ptr<Unit>>& named,
                                            const char* control, const Unit& of) const;
  // what a backward issues
  BackwardView view_of_backward(const Entry* first) const;
  ViewFrame frame_of_views() const;
  std::uint64_t hash_of_agreed() const;
  BackwardView any_rank_says(const BackwardView& mine);
  [[noreturn]] void name_difference();
  void keep_forward();
  bool is_to_be_reduced(const Unit& unit) const;
  void plan_backward_under_way(const Entry* first);
  void warn_of_no_scope();
  // backward: backward.cpp
  [[noreturn]] void refuse_forgotten(const Entry& entry);
  void refuse_other_step(const Entry& entry);
  BackwardUnderWay* under_way(const Entry& entry, bool needs_weights);
  void finish(BackwardUnderWay& backward);
  bool any_rank_owes();
  void settle_gradients();

  Groups groups_;
  std::shared_ptr<comm::BufferPool> pool_;
  bool gives_gradients_back_ = false;
  grad::GradSink sink_;
  grad::WeightGradStore store_{sink_};
  grad::WeightGradStore under_exchange_{sink_};
  std::vector<Unit*> units_;
  std::vector<std::shared_ptr<Unit>> orphans_;  // without a handle, while others have one
  bool agreed_ = false;
  std::uint64_t layout_ = 0;
  Reducer reducer_;
  Publisher publisher_{groups_, reducer_, units_};
  UnitTrace spans_;

  ModelControls switches_;
  bool has_scaler_ = false;
  bool controls_known_ = false;
  std::string controls_;
  std::string marks_;
  std::string model_ = "a model that is being sharded";

  Forwards forwards_;
  Unit* kept_ = nullptr;  // the last unit of the forward, whose memory stays for backward
  PendingBackward::Count outstanding_ =
      std::make_shared<std::atomic<int>>(0);  // of entries since reset()
  std::int64_t gathers_issued_ = 0;

  std::atomic<bool> in_backward_ = false;
  std::deque<BackwardUnderWay> under_way_;  // outermost first
  RepeatedCalls repeated_;
  bool views_differ_ = false;        // ranks' backwards go through different calls
  bool is_graph_unchecked_ = false;  // a repeated forward began the backward
  bool awaiting_tickets_ = false;
  bool holds_reductions_ = false;
  bool waits_for_last_ = false;  // reductions are issued that no gradient shows yet

  std::shared_ptr<OpenStep> step_;    // null outside of a step scope
  std::optional<comm::Turns> turns_;  // once a pair has run
  std::uint64_t steps_ = 0;           // so far
  StepPlanning planning_;
  std::shared_ptr<grad::Regions> regions_;
  bool warned_of_no_scope_ = false;
  bool warned_of_schedules_ = false;
  bool warned_of_no_pairs_ = false;
  std::vector<RecomputeMode> followed_;  // by unit, of the last step scope

  const Unit* entered_ = nullptr;  // by the last forward or backward
  const char* entered_by_ = "";
  comm::Event read_until_;  // by a copy that is under way, on a device

  bool failed_ = false;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<std::uint64_t> abandoned_ = ~std::uint64_t{0};  // the generation whose backward was
  std::uint64_t recoveries_ = 0;  // of the world, when this was last reset
};

}  // namespace tessera::fsdp
