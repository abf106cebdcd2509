// OpenStep: one step of a sharded tree, while a StepScope is open. [Note: step scope]
//
// Weights do not change inside the step. So nothing is compared with the shards, gradients of the
// user are not imported, and nothing is published before finish(). The step knows the stage and
// micro-batch of each forward and backward, which the runtime alone does not know. So it chooses
// for each backward whether weight gradients are deferred, and it reduces and reshards a stage when
// the stage ends.
//
// Agreed values alone decide which collectives are issued. The first step of a schedule agrees at
// each backward, as outside of a step, and records what each stage enters and what its backward
// goes through (StepRecord). A later step agrees on that record and on all settings when it begins,
// and not again until finish(). Its forwards must enter the recorded units, and its backwards may
// go through no others; else the step fails on all ranks. A backward that leaves out a unit runs
// the actions of that unit all the same. Where micro-batches of one stage enter different units, no
// step follows a record: each one records.
//
// A step that follows a record runs the actions of a StepPlan (../agreed/step_plan.h) and no
// others: what is gathered, waited for, kept, released and reduced, at which place of which forward
// and backward. The plan is made when the step begins, from the record, the settings and the units
// that are gathered then; all ranks have agreed on these three. The model's planner
// (Runtime::set_planner) makes it, and ranks compare its hash; without a planner it is the eager
// plan. In a step that records, each backward has a separate plan, as outside of a scope, and after
// each backward only the units of stays() are unsharded.
//
// [Note: pairs] run_pair() runs a forward while a backward runs: two call stacks on the rank's
// thread take turns at exchanges (comm/turns.h), so that exchanges of one are under way while the
// other computes. Each of the two has its action and its pass (UnderWay). Each function that the
// runtime calls belongs to one of the two (now_); recomputation belongs to the backward. A unit
// that both use is gathered by the first that enters it and released by the last that leaves it,
// and each has separate AccumulateGrad nodes there (grad/pair_accumulators.h). The order of turns
// depends on counts alone: ranks with equal counts have the same order.
//
// Ranks issue exchanges in the same order if all take the same number of turns. So a step that
// records counts the turns of each stage's forward and backward, and ranks compare the counts when
// a later step begins. A pass with another count fails. The two do not overlap in a step that
// records, with a planner, where ranks or micro-batches have different counts, or where a
// checkpoint draws random numbers from the process's generator: then the forward runs after the
// backward. So no forward overlaps with a recorded backward, which agrees with other ranks as it
// runs.
//
// The runtime owns the step while it is open; the StepScope keeps it longer, to report that the
// step has ended. The functions of the runtime that the step calls are grouped in runtime.h. Next:
// open_step.cpp (the calls of a scope), step_agreement.cpp, step_passes.cpp (the forwards and
// backwards inside), step_pairs.cpp, ../agreed/order.h.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/hash.h"
#include "fsdp/agreed/known_steps.h"
#include "fsdp/agreed/order.h"
#include "fsdp/agreed/step_plan.h"
#include "fsdp/runtime/forwards.h"
#include "fsdp/runtime/pass.h"
#include "tessera/error.h"
#include "tessera/step_scope.h"

namespace tessera::grad {
class PairAccumulators;
}  // namespace tessera::grad

namespace tessera::fsdp {

class Runtime;
class Unit;

class OpenStep {
 public:
  /// Errors: kUsage.
  static void check(const StepScopeOptions& options, const char* what);
  /// Runtime::open_step() then calls agree_at_begin(), choose_plan() and settle_into() in turn.
  OpenStep(Runtime& runtime, StepScopeOptions options, std::uint64_t number);

  // --- the functions of StepScope ---
  void begin_forward(int stage, std::int64_t micro_batch);
  void begin_backward(int stage, std::int64_t micro_batch, Backward backward);
  void run_pair(const StepForward& forward, const StepBackward& backward);
  void run_weight_gradients(int stage, std::int64_t micro_batch);
  void reshard(int stage);
  void reduce(int stage);
  void finish();
  bool records() const { return records_; }
  /// Whether a forward and a backward are under way at the same time.
  bool is_pair() const { return forward_.pass.paired != nullptr; }

  // --- called by the runtime ---
  /// The next three begin the step, in this order. The first two are collective.
  void agree_at_begin();
  void choose_plan();
  void settle_into();
  std::uint64_t number() const { return number_; }  ///< counts the runtime's steps
  /// Returns the last part of labels: model, controls, stage under way and a planner's plan.
  const std::string& marks() const { return *now_->marks; }
  /// The micro-batch of the forward or backward under way, for labels.
  std::uint32_t micro_batch() const { return now_->micro_batch(); }
  void begin_outermost();
  /// Notes that a unit is entered at `position` of the outermost forward under way. Errors: kComm
  /// where the record has another unit there.
  void enter(const Unit& unit, std::size_t position, std::uint32_t checkpoint);
  /// Makes the unit's parameters readable and runs the actions that overlap with its forward. Not
  /// called in a step that records.
  void gather_for(Unit& unit, std::size_t position);
  /// Whether the runtime keeps forwards, for an agreement when their backward begins.
  bool keeps_forwards() const { return records_; }
  void leave(Unit& unit, bool is_outermost);
  void plan_backward(const Entry* first);
  void pre_backward(Entry& entry);
  void post_backward(Entry& entry);
  void end_backward();
  /// Returns the forwards of the micro-batch whose backward is under way, if any.
  std::vector<std::shared_ptr<Segment>> segments_under_way() const;
  /// Returns the action under way, as text, for agreements and messages.
  std::string action_as_text() const;
  /// Notes that units have come or gone, so that the step cannot continue.
  void units_changed() { units_changed_ = true; }

 private:
  enum class Kind : std::uint8_t { kNone, kForward, kBackward, kWeights, kReshard, kReduce };
  struct Action {
    Kind kind = Kind::kNone;
    int stage = 0;
    std::int64_t micro_batch = 0;
    Backward backward = Backward::kFull;
    bool began = false;        ///< of a backward: autograd has reached a unit
    std::size_t parts = 0;     ///< of a forward: number of outermost forwards that have ended
    std::uint32_t before = 0;  ///< of a forward: number of checkpoints that ran before it
  };
  /// A call that is under way: in a pair, one of two.
  struct UnderWay {
    Action action = {};
    const std::string* marks = nullptr;
    Pass pass = {};                 ///< of a forward or backward; no plan in a recorded forward
    std::int64_t turns_before = 0;  ///< number of turns of this rank when it began
    std::uint64_t drew_before = 0;  ///< checkpoints_that_drew() when it began
    std::uint32_t micro_batch() const { return static_cast<std::uint32_t>(action.micro_batch); }
  };
  enum class State : std::uint8_t { kForward, kInputDone, kDone };
  struct MicroBatch {
    State state = State::kForward;
    MicroBatchClass which = MicroBatchClass::kMiddle;
    std::vector<std::weak_ptr<Segment>> segments;
    std::vector<Trace> parts;  // where the step records
  };
  struct Stage {
    std::map<std::int64_t, MicroBatch> micro_batches;
    std::vector<UnitId> units;  // first_entries() of its forwards; empty: not run yet
    std::string marks;
    bool had_backward = false;
    bool resharded = false;
    bool reduced = false;
  };
  /// The state of a unit in the step.
  struct OfUnit {
    std::uint64_t users = 0;      // stages that enter it, one bit each
    std::uint64_t resharded = 0;  // of these, those with reshard()
    std::uint64_t reduced = 0;    // of these, those with reduce() since the unit was reduced
    bool dirty = false;           // it may have gradients that are not reduced
  };

  static std::string named(int stage);
  static std::string named(int stage, std::int64_t micro_batch);
  // step_agreement.cpp
  std::exception_ptr make_plan();
  StepPlan planned(const PlanInputs& inputs) const;
  std::exception_ptr agree_on(const StepPlan& plan, std::exception_ptr refusal) const;
  std::exception_ptr agree_at_end(const std::exception_ptr& mine);
  std::string record_as_text() const;
  std::string log_as_text() const;
  // open_step.cpp
  ReduceAt reduce_at() const;
  void require_next(const Stage& stage, std::int64_t micro_batch) const;
  void require_open(const char* what) const;
  void require_not_over(const char* what) const;
  void require_nothing_under_way(const char* what) const;
  Stage& stage_of(int stage, const char* what);
  MicroBatch& micro_batch_of(int stage, std::int64_t micro_batch, const char* what);
  void require_not_resharded(int stage, std::int64_t micro_batch, const char* what);
  void require_not_reduced(int stage, std::int64_t micro_batch, const char* what);
  void require_may_run_backward(int stage, std::int64_t micro_batch, Backward backward,
                                const char* what);
  void start_forward(int stage, std::int64_t micro_batch);
  void start_backward(int stage, std::int64_t micro_batch, Backward backward);
  void start(UnderWay& under, Action action);
  void reset(UnderWay& under);
  void end_action();
  void end_forward();
  void use_units(int stage, const std::vector<Trace>& parts);
  bool all_have_run() const;
  bool is_last_user(std::uint64_t said, const OfUnit& of) const;
  static bool is_over(const Stage& stage);
  void mark_dirty(int stage);
  void require_whole();
  std::exception_ptr refusal_of_end();
  // step_pairs.cpp
  std::string why_in_turn(int forward_stage, int backward_stage) const;
  void call_of_pair(int stage, std::int64_t micro_batch, const std::function<void()>& run);
  void run_overlapped(const StepForward& forward, const StepBackward& backward);
  static void count_turns(const UnderWay& under, std::optional<std::int64_t>& recorded,
                          bool is_first);
  void require_turns(const std::string& of, std::int64_t found, std::int64_t expected);
  // step_passes.cpp
  [[noreturn]] void fail(ErrorKind kind, const std::string& message);
  [[noreturn]] void leave_record(const std::string& found, const std::string& expected);
  [[noreturn]] void leave_record_in(const std::string& action, const std::string& found,
                                    const std::string& expected, const char* what_mends);
  std::string name_of(const std::vector<Trace>& parts, std::size_t part,
                      std::size_t position) const;
  bool stays(const Unit& unit) const;
  void release_transient();
  void require_outside_of_backward();
  void require_of_action(const Entry& entry);
  std::vector<Reach> agreed_reach(const Entry* first);
  std::shared_ptr<const PassPlan> plan_recorded();
  void follow(UnderWay& under, PassPlan MicroBatchPlan::* which);
  MicroBatch& micro_batch_of(const UnderWay& under);

  Runtime& runtime_;
  const StepScopeOptions options_;
  const std::uint64_t number_;
  bool records_ = true;
  bool units_changed_ = false;
  bool finished_ = false;
  bool asked_for_pairs_ = false;
  bool inside_pair_ = false;    // a function of a pair runs, overlapped or not
  KnownStep* known_ = nullptr;  // valid while the step begins; null: it records
  StepRecord record_;           // followed, or recorded so far
  StepTurns turns_;             // followed, or recorded so far
  bool ranks_turn_alike_ = true;
  std::shared_ptr<const StepPlan> step_plan_;  // null in a step that records
  // BufferPool::requests() when a planner has made the plan for this step; none: there is no new
  // plan.
  std::optional<std::uint64_t> first_of_plan_;
  std::vector<Stage> stages_;
  std::vector<OfUnit> units_;
  std::vector<std::vector<UnitId>> owners_;         // by unit
  HeldUnits held_;                                  // all units, until the step has ended
  std::uint64_t weights_ = 0;                       // weights_of(*held_) when it began
  UnderWay forward_;                                // the forward under way
  UnderWay backward_;                               // the backward, or another call
  UnderWay* now_ = &backward_;                      // the one whose code ran last
  grad::PairAccumulators* accumulators_ = nullptr;  // while a pair overlaps
  std::vector<Action> log_;
  std::string base_marks_;
  StageRecord recorded_;  // of the backward under way, in a step that records
};

}  // namespace tessera::fsdp
