// Runtime: runs the units of one sharded tree, in an order that all ranks agree on.
//
// There is one for each root handle. It follows forwards (gather, prefetch, release) and backwards
// (gather, markers, reduce), and publishes gradients on the shards when the outermost backward
// ends. Its parts are values and executors: controls.h (what users switch), forwards.h (what was
// run), order.h and pass.h (what a backward issues), reducer.h, publisher.h, unit.h and bucket.h
// (what moves bytes). Its own functions are in runtime.cpp (units, forward), backward.cpp (what
// ranks agree on when a backward begins, and its end), pass.cpp (what the actions do) and
// between_steps.cpp (controls, checks, failures). open_step.h has what a step scope changes.
//
// A PassPlan lists the actions of one forward or backward. pass_planner.h makes all of them, and
// advance() runs them. A step that follows a record has its plans when it begins. In a step that
// records, and outside of a step, a plan is made when a backward begins and ranks have agreed on
// the forwards that it goes through; other backwards may run inside that backward
// (BackwardUnderWay). A forward that is not known in advance has no plan: it gathers each unit that
// it enters.
//
// [Note: readiness] Gradients are never counted, since a count would not tell when a unit's
// backward is over: parameters stay unused, hooks fire twice under recomputation, functions return
// undefined gradients. It is over when the unit's *marker* has run, an identity node at a
// grad-requiring input of its forward (call.cpp), or when the backward reaches a node that is older
// than that forward: autograd runs the newest nodes first. The agreed list ([Note: collective
// order]) says after which place a unit is reduced. Deferred gradients hold tickets: while any
// gradients are deferred, all units are reduced together, once no rank has an open ticket.
// Gradients that a backward defers only until one of its exchanges (under_exchange()) are formed
// when the next marker runs, at the latest.
//
// [Note: release] A unit's unsharded memory is released at its marker, not when its last gradient
// arrives: with a frozen base and adapters all gradients arrive before the base weight's last use.
//
// Threads: the rank's thread runs forwards; that thread or another one runs the backward, never
// both at the same time. But a graph may be destroyed on any thread: on the one that drops the last
// reference to it (PendingBackward), or, after an exception, on a device thread of autograd. The
// device thread may free the graph task after the rank's thread has left with the error and begun
// its next forward. So it only aborts the World, which any thread may do, and notes that the
// backward has ended (abandon_backward). The rank's thread drops what the runtime owns when it
// enters the runtime next (take_up_abandoned).
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

// Messages for a difference between ranks that a backward or the end of a step scope has found.
// `difference` is the first one, as text.
std::string calls_differ(const std::string& what, const std::string& difference);
std::string units_differ(const std::string& difference);

/// A backward under way: the outermost one, or one that a node of another backward runs, of which
/// autograd gives no notice.
struct BackwardUnderWay {
  Pass pass;
  std::vector<std::uint32_t> forwards;  ///< its parts: numbers of the forwards that it goes through
  std::vector<Reach> reached;           ///< by part: what any rank's backward goes through
  std::vector<PassedPlace> places;      ///< in the order in which the backward passes them
  std::size_t passed = 0;               ///< index of the last place that this rank has passed
  std::vector<std::shared_ptr<Segment>> segments;  ///< this rank's segments of these forwards

  /// Returns the index of the entry's part, or the number of parts where it is in none.
  std::size_t part_of(const Entry& entry) const;
  /// Searches `places` from `passed` on. Returns the end where this rank has passed the place
  /// already.
  std::vector<PassedPlace>::const_iterator find(const PassedPlace& place) const;
  void note_passed(const PassedPlace& place);
};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// `in_flight_bytes`: see ShardOptions.
  Runtime(Mesh mesh, std::optional<std::int64_t> in_flight_bytes);
  ~Runtime();

  const Mesh& mesh() const { return groups_.mesh(); }
  World& world() const { return groups_.world(); }
  comm::IssueQueue& queue() { return world().queue(); }
  const std::shared_ptr<comm::BufferPool>& pool() { return pool_; }
  /// Frees the memory of a bucket's gradients once all of them are cleared, from now on, as on a
  /// device. By default the CPU keeps that memory for the next step, since new pages cost more.
  void free_gradients() { frees_gradients_ = true; }
  bool frees_gradients() const { return frees_gradients_; }
  grad::GradSink& sink() { return sink_; }
  Groups& groups() { return groups_; }
  comm::Group* data_group() const { return groups_.data(); }
  at::Device device() const { return pool_->device(); }
  layout::PlanOptions plan_options() const;

  /// Units are numbered in the order of adding, the same on every rank.
  void add_unit(Unit* unit);
  /// Does nothing where the unit was removed before.
  void remove_unit(Unit* unit);
  /// Keeps the unit in the tree until the next forward of another handle, a place that all ranks
  /// pass. After that, a graph that a rank keeps holds the unit's memory, but not its place in the
  /// tree.
  void handle_is_gone(Unit& unit);
  const std::vector<Unit*>& units() const { return units_; }
  /// Checks that all ranks have the same contracts and plans. Collective. Errors: kContract naming
  /// the first difference.
  void agree_on_plan();
  /// Checks that all ranks of the stage have the same `lines`. Collective. Errors: kContract naming
  /// the first difference and the `hint`.
  void agree(const std::string& lines, const char* what, const char* hint);
  /// Releases all unsharded memory before units are laid out again. Nothing may be under way.
  void begin_relayout();
  /// A number that changes with every begin_relayout().
  std::uint64_t layout() const { return layout_; }

  // --- forward, called by Call (call.cpp) ---
  /// Errors: kUsage where the World is closed; kComm after a failure that World::recover() has not
  /// ended.
  void require_recovered() const;
  /// Makes the unit's parameters readable. Returns null when the forward need not be recorded.
  std::shared_ptr<Entry> enter_forward(Unit& unit);
  std::shared_ptr<Entry> enter_recompute(Unit& unit);
  /// Enters a forward inside a backward, which has to repeat a recorded forward (repeated_calls.h):
  /// makes the unit's parameters readable and records nothing. Returns false for an ordinary
  /// forward: one without grad mode in a backward that does not go through this model. Errors:
  /// kUsage, on all ranks.
  bool enter_repeated(Unit& unit);
  void leave_repeated(Unit& unit);
  /// Whether the unit's memory is released when its forward under way ends, even if a result shows
  /// that memory.
  bool reshards_after(const Unit& unit) const;
  void leave_forward(Unit& unit);
  /// Whether a forward is under way that has entered no unit but the outermost one.
  bool is_in_outermost() const { return forwards_.is_outermost(); }
  /// Ends the step after an exception in a forward or backward; aborts the World.
  void fail(const std::string& why);
  /// A number that changes with every failure: a call that began before a failure must not
  /// continue.
  std::uint64_t generation() const { return generation_; }

  // --- backward, called by the nodes of call.cpp ---
  /// Agrees with the other ranks on what the backward issues, once for each backward. `first`: the
  /// unit's forward that the backward has reached, if any.
  void begin_backward(const Entry* first = nullptr);
  void end_backward();
  /// Aborts the World and notes that the backward which began at `generation` has ended without
  /// end_backward(). `epoch`: World::recoveries() when it began. Does nothing the second time, or
  /// after a reset(). Threads: any.
  void abandon_backward(std::uint64_t generation, std::uint64_t epoch);
  void pre_backward(Entry& entry);
  void post_backward(Entry& entry);
  void on_gradient();
  void on_tickets_closed();
  /// Counts the entry's backward as pending: on the model, its unit and the owners of its
  /// parameters.
  void expect(Entry& entry);

  // --- steps, called by StepScope (step_scope.h) ---
  /// Opens a step, as the constructor of StepScope says. Collective.
  std::shared_ptr<OpenStep> open_step(StepScopeOptions options);
  /// Fails a step whose scope ends without finish(). Does nothing where the step has ended.
  void give_up(const OpenStep& step);

  // --- called by the step that is open (open_step.h) ---
  /// Whether the step has not ended yet. Threads: the rank's thread.
  bool is_open(const OpenStep& step);
  bool is_in_backward() const { return in_backward_; }
  bool is_under_way() const { return in_backward_ || forwards_.is_open(); }
  Forwards& forwards() { return forwards_; }
  grad::WeightGradStore& store() { return store_; }
  grad::WeightGradStore& under_exchange() { return under_exchange_; }
  comm::Turns& turns();
  /// Logs once, on rank 0, why forwards and backwards do not overlap.
  void warn_of_no_pairs(const std::string& why);
  StepPlanning& planning() { return planning_; }
  HeldUnits held_units() const;
  PlanUnit plan_unit(const Unit& unit) const;  ///< the unit as plans see it
  std::string memory_lines() const;            ///< the unsharded units, as text
  /// Begins the sums of a backward or a step: marks every unit as not reduced yet.
  void begin_sums();
  void import_user_changes() { publisher_.import_user_changes(switches_); }
  /// Returns what any rank's backward goes through, and forgets the forwards of which no rank has a
  /// graph. Collective. Errors: kComm where traces differ between ranks; kUsage where parameters
  /// were changed since a forward that this rank's backward goes through.
  BackwardView agree_on_backward(const Entry* first);
  /// Begins a unit's forward or backward: makes its parameters readable, then runs the actions that
  /// overlap with its computation.
  void begin_place(Pass& pass, const PlanPlace& place, Unit& unit);
  /// Runs the next actions of the pass, in order, until `count` of them are done.
  void advance(Pass& pass, std::size_t count);
  /// Reduces the unit's gradients. `is_shown_next`: whether they are published at the end of this
  /// backward, before the user can read them.
  void reduce(Unit& unit, bool is_shown_next);
  void leave_backward();
  /// Requires that the user has not changed or cleared gradients in this step. Errors: kUsage.
  void require_as_seen(const char* what) const { publisher_.require_as_seen(what); }
  /// Reduces the pending gradients and those of the units in `dirty` (by unit), and publishes all.
  void settle(const std::vector<bool>& dirty);
  /// Keeps the record for later steps, unless micro-batches of a stage differ.
  void know_step(const KnownSteps::Schedule& schedule, StepRecord record, StepTurns turns);
  /// Ends the step scope, if one is open, whether it has finished, failed or was left.
  void end_scope();

  // --- user controls ---
  /// Sets the factor by which losses are multiplied, and final gradients divided: a power of two.
  /// Errors: kUsage in the middle of a step, naming `what`.
  void set_loss_scale(double scale, const char* what);
  double loss_scale() const { return switches_.loss_scale; }
  void set_has_scaler(bool value) { has_scaler_ = value; }
  bool has_scaler() const { return has_scaler_; }
  /// Requires what require_idle() and require_synced() require. Errors: kUsage.
  void require_whole_sums(const char* what);
  /// Requires what require_whole_sums() requires, and that no shard has a gradient, since the units
  /// are about to be laid out again. Errors: kUsage.
  void require_between_steps(const char* what);
  void set_requires_replica_reduce(bool value);
  void set_is_last_backward(bool value);
  /// Errors: kUsage as require_idle().
  void set_defer_weight_gradients(bool value);
  void run_weight_gradients();
  /// Must be called when anything in controls() may have changed.
  void controls_changed() { controls_known_ = false; }
  /// The current controls.
  Controls controls() const;
  /// Sets the object that replays the model's regions from now on; null: none is replayed. Errors:
  /// kUsage in a step.
  void set_regions(std::shared_ptr<grad::Regions> regions);
  const std::shared_ptr<grad::Regions>& regions() const { return regions_; }
  /// Sets the function that makes the plans of step scopes from now on. `while_recording`: the
  /// recompute mode of steps that have no plan yet, for units whose mode a plan may choose. Errors:
  /// kUsage in a step.
  void set_planner(Planner planner, RecomputeMode while_recording);
  /// Requires that the model is not compiled. Called before its units join another runtime, which
  /// has neither the plans nor the regions of this one. Errors: kUsage where there is a planner, or
  /// regions are replayed.
  void require_not_compiled(const std::string& what) const;
  std::vector<PlanUnit> plan_units() const;  ///< the units as they are now
  /// The plan of the last step scope that followed one; null where none has.
  const std::shared_ptr<const StepPlan>& followed_plan() const { return planning_.followed; }
  /// The recompute mode of each unit, as its user has set it, or kNone.
  std::vector<RecomputeMode> own_recompute() const;
  /// Sets the recompute mode of each unit for the step that begins, until end_following().
  void follow_recompute(const std::vector<RecomputeMode>& modes);
  void end_following();
  const std::vector<RecomputeMode>& followed_recompute() const { return followed_; }
  /// The controls as text. The text is part of every label and of the agreement on the forward
  /// order, so that a difference between ranks is found. [Note: controls]
  const std::string& controls_as_text();
  /// The model's name and the controls, for labels: without the name, two models of the same class
  /// would have the same labels. Inside a step the stage is named, too.
  const std::string& marks();
  /// Names the model, for labels from now on. Called after agree_on_plan(). Collective where there
  /// are pipeline stages.
  void name_model();
  const std::string& model_name() const { return model_; }
  /// Starts the unit's gather for the user, and keeps the unit unsharded. Collective.
  void begin_unshard(Unit& unit);
  void wait_unshard(Unit& unit);
  /// Waits until a reduction of an earlier micro-batch no longer uses the unit's slots.
  void free_slots_of(const Unit& unit) { reducer_.free_wires(unit); }
  /// Calls Publisher::forget_cleared(), unless a backward is under way. Called after zero_grad(),
  /// and before the next forward makes activations, since an optimizer of torch::optim clears
  /// gradients without a call of zero_grad().
  void forget_cleared();
  /// Requires that gradients can be read. Errors: kUsage while reductions wait for the last
  /// backward; those of GradSink::require_all_redeemed.
  void require_reduced(const char* what) const;
  /// Requires that no rank has deferred gradients left. Errors: kUsage.
  void require_none_deferred(const char* what) const;
  /// Requires that no micro-batch waits to be reduced or to be summed over replicas. Errors: kUsage
  /// as require_reduced(), naming the unit.
  void require_synced(const char* what) const;
  /// Requires that zero_grad() was called since a failure last lost gradients. Errors: kUsage.
  void require_none_lost(const char* what) const;
  /// Requires that no step scope is open, no recorded forward waits for its backward, and no
  /// gradients are deferred. Errors: kUsage.
  void require_idle(const char* what) const;
  /// Requires that no step scope is open. Errors: kUsage.
  void require_no_step(const char* what) const;
  /// Whether an exception has ended a step, and no reset() came since.
  bool has_failed() const;
  /// Calls reset() after a failure that World::recover() has ended. Every function that may be
  /// called first after a failure begins with this call.
  void renew_after_failure();
  /// Releases all unsharded memory and forgets everything under way, also published gradients.
  void reset();
  // The next three are documented in handle.h.
  std::string last_entered() const;
  void are_read(const comm::Event& end);
  void order_after_reads();
  std::int64_t gathers_issued() const { return gathers_issued_; }
  std::int64_t reductions_issued() const { return reducer_.issued(); }

 private:
  /// Drops everything under way of a step that failed.
  void end_step();
  /// Ends the step if abandon_backward() was called for its backward. Threads: the rank's thread.
  void take_up_abandoned();
  // units and forward: runtime.cpp
  void check_usable();
  void number_units();
  void remove_orphans();
  /// The first line in which `lines` differs between ranks, as text. Collective.
  std::string difference_between_ranks(const std::string& lines, const char* what);
  std::shared_ptr<Entry> record(Unit& unit, std::size_t position);
  /// Where the gathers of a unit are issued: in the call, or before it by a plan.
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
  bool any_rank_has_tickets();
  void settle_gradients();

  Groups groups_;
  std::shared_ptr<comm::BufferPool> pool_;
  bool frees_gradients_ = false;
  grad::GradSink sink_;
  grad::WeightGradStore store_{sink_};
  grad::WeightGradStore under_exchange_{sink_};
  std::vector<Unit*> units_;
  std::vector<std::shared_ptr<Unit>> orphans_;  // units whose handle is gone
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
  Unit* kept_ = nullptr;  // the last unit of the forward, which stays unsharded for its backward
  PendingBackward::Count outstanding_ =
      std::make_shared<std::atomic<int>>(0);  // number of pending backwards since reset()
  std::int64_t gathers_issued_ = 0;

  std::atomic<bool> in_backward_ = false;
  std::deque<BackwardUnderWay> under_way_;  // outermost first
  RepeatedCalls repeated_;
  bool views_differ_ = false;        // ranks' backwards go through different calls
  bool is_graph_unchecked_ = false;  // a repeated forward began the backward
  bool awaiting_tickets_ = false;
  bool holds_reductions_ = false;
  bool waits_for_last_ = false;  // reductions were issued that are not published yet

  std::shared_ptr<OpenStep> step_;    // null outside of a step scope
  std::optional<comm::Turns> turns_;  // once a pair has run
  std::uint64_t steps_ = 0;           // number of steps so far
  StepPlanning planning_;
  std::shared_ptr<grad::Regions> regions_;
  bool warned_of_no_scope_ = false;
  bool warned_of_schedules_ = false;
  bool warned_of_no_pairs_ = false;
  std::vector<RecomputeMode> followed_;  // by unit, of the last step scope

  const Unit* entered_ = nullptr;  // the unit of the last forward or backward
  const char* entered_by_ = "";
  comm::Event read_until_;  // end of a copy that reads the shards, on a device

  bool failed_ = false;
  std::atomic<std::uint64_t> generation_ = 0;
  // The generation of the last backward that was abandoned.
  std::atomic<std::uint64_t> abandoned_ = ~std::uint64_t{0};
  std::uint64_t recoveries_ = 0;  // World::recoveries() at the last reset()
};

}  // namespace tessera::fsdp
