// The calls of a step scope: the order of its actions, and how the step begins and ends.
#include "fsdp/runtime/open_step.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/doing.h"
#include "base/interrupt.h"
#include "comm/turns.h"
#include "fsdp/runtime/recompute_scopes.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

static_assert(StepScopeOptions::kMostStages <= 64, "a bit each in OpenStep::OfUnit");

/// Runs `act`, whose exceptions end the step on all ranks.
template <class Act>
void failing(Runtime& runtime, const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    if (!runtime.has_failed()) runtime.fail(error.what());
    throw;
  }
}

}  // namespace

// ------------------------------------------------------------------------------------- begin, end

std::string OpenStep::named(int stage) { return concat("stage ", stage); }
std::string OpenStep::named(int stage, std::int64_t micro_batch) {
  return concat(named(stage), ", micro-batch ", micro_batch);
}

OpenStep::OpenStep(Runtime& runtime, StepScopeOptions options, std::uint64_t number)
    : runtime_(runtime),
      options_(std::move(options)),
      number_(number),
      stages_(static_cast<std::size_t>(options_.stages)),
      units_(runtime.units().size()) {
  reset(forward_);
  reset(backward_);
  for (const auto* unit : runtime.units()) {
    std::vector<UnitId> ids;
    for (const auto& owner : unit->owners) ids.push_back(owner->id());
    owners_.push_back(std::move(ids));
  }
}

void OpenStep::check(const StepScopeOptions& options, const char* what) {
  constexpr int kMost = StepScopeOptions::kMostStages;
  TESSERA_CHECK(options.stages >= 1 && options.stages <= kMost, ErrorKind::kUsage, what, ": found ",
                options.stages, " stages of a rank, expected 1 to ", kMost);
  TESSERA_CHECK(!options.micro_batches || (*options.micro_batches >= 1 && options.stages == 1),
                ErrorKind::kUsage, what, ": found ", options.micro_batches.value_or(0),
                " micro-batches of ", options.stages,
                " stages, expected at least one of one stage; leave "
                "StepScopeOptions::micro_batches out where a rank has several");
}

/// Makes the plan before anything of the step begins. A refusal is the same on all ranks of the
/// stage. It leaves the model and the World as they are, unless other stages of a pipeline wait for
/// this one.
void OpenStep::choose_plan() {
  if (records_) return;
  std::exception_ptr refusal;
  failing(runtime_, [&] { refusal = make_plan(); });
  if (!refusal) return;
  const auto* group = runtime_.data_group();
  const int here = group == nullptr ? 1 : group->size();
  if (runtime_.world().size() == here) std::rethrow_exception(refusal);
  failing(runtime_, [&] { std::rethrow_exception(refusal); });
}

void OpenStep::settle_into() {
  failing(runtime_, [&] {
    runtime_.import_user_changes();
    runtime_.begin_sums();
    base_marks_ = runtime_.marks();
    for (std::size_t i = 0; i < units_.size(); ++i) {
      units_[i].dirty = runtime_.units()[i]->progress().pending;
    }
    held_ = runtime_.held_units();
    weights_ = weights_of(*held_);
    const auto while_recording = runtime_.planning().while_recording;
    runtime_.follow_recompute(step_plan_ ? step_plan_->choices.recompute
                                         : std::vector(units_.size(), while_recording));
    for (int stage = 0; stage < options_.stages; ++stage) {
      auto& of = stages_[static_cast<std::size_t>(stage)];
      of.marks = concat(base_marks_, ", stage ", stage);
      if (!records_) of.marks += known_->marks;
      use_units(stage, record_.stages[static_cast<std::size_t>(stage)].parts);
    }
  });
}

ReduceAt OpenStep::reduce_at() const {
  if (!options_.micro_batches) return ReduceAt::kAsked;
  return options_.sync_every_micro_batch ? ReduceAt::kEveryBackward : ReduceAt::kLastBackward;
}

void OpenStep::require_open(const char* what) const {
  require_not_over(what);
  require_nothing_under_way(what);
}

void OpenStep::require_not_over(const char* what) const {
  const bool is_open = runtime_.is_open(*this);
  TESSERA_CHECK(!inside_pair_, ErrorKind::kUsage, what,
                ": found a call inside of a function of StepScope::run_pair(), expected it after "
                "the pair");
  TESSERA_CHECK(!finished_, ErrorKind::kUsage, what,
                ": found a step that has finished, expected one that is open; open another "
                "StepScope");
  TESSERA_CHECK(
      is_open && !runtime_.has_failed(), ErrorKind::kComm, what,
      ": found a step that has failed, expected one that is open; recover the World on every rank "
      "(World::recover, world.recover() in Python), then zero_grad(), and open another StepScope");
}

void OpenStep::require_nothing_under_way(const char* what) const {
  TESSERA_CHECK(!units_changed_, ErrorKind::kUsage, what,
                ": found that units of the model have come or gone since the step began, expected "
                "the same ones; keep the handles until finish()");
  TESSERA_CHECK(!runtime_.is_under_way(), ErrorKind::kUsage, what,
                ": found a forward or backward under way, expected that it has ended");
}

void OpenStep::require_whole() {
  runtime_.sink().require_all_redeemed("StepScope::finish");
  if (options_.micro_batches) {
    const auto found = std::ssize(stages_.front().micro_batches);
    TESSERA_CHECK(found == *options_.micro_batches, ErrorKind::kUsage, "StepScope::finish: found ",
                  found, " micro-batches, expected the ", *options_.micro_batches,
                  " of StepScopeOptions::micro_batches");
  }
  for (int stage = 0; stage < options_.stages; ++stage) {
    const auto& of = stages_[static_cast<std::size_t>(stage)];
    for (const auto& [number, one] : of.micro_batches) {
      TESSERA_CHECK(one.state != State::kInputDone, ErrorKind::kUsage, "StepScope::finish: found ",
                    named(stage, number),
                    " without its run_weight_gradients(), expected one after its "
                    "Backward::kInputOnly");
      TESSERA_CHECK(one.state == State::kDone || !of.had_backward, ErrorKind::kUsage,
                    "StepScope::finish: found ", named(stage, number),
                    " without its backward, expected one as the stage's other micro-batches had");
    }
  }
  TESSERA_CHECK(weights_of(*held_) == weights_, ErrorKind::kUsage,
                "StepScope::finish: found parameters that were changed inside the step, expected "
                "those that it began with; change them between steps");
  // An optimizer of torch::optim clears gradients without the handle's zero_grad().
  runtime_.require_as_seen("StepScope::finish");
}

/// Returns why this rank refuses finish(), or null. Errors: those of a step that has failed.
std::exception_ptr OpenStep::refusal_of_end() {
  try {
    require_nothing_under_way("StepScope::finish");
    end_action();
    require_whole();
  } catch (const std::exception&) {
    if (runtime_.has_failed() || base::handles_interrupt()) throw;
    return std::current_exception();
  }
  return nullptr;
}

void OpenStep::finish() {
  require_not_over("StepScope::finish");
  auto refusal = refusal_of_end();
  failing(runtime_, [&] { refusal = agree_at_end(refusal); });
  if (refusal) std::rethrow_exception(refusal);  // on all ranks; the step is open as before
  failing(runtime_, [&] {
    std::vector<bool> dirty;
    for (const auto& unit : units_) dirty.push_back(unit.dirty);
    runtime_.settle(dirty);
    for (auto* unit : runtime_.units()) {
      if (unit->controls.reshard_after_backward) unit->release();
    }
    // Frees idle memory that steps with other plans took: a plan's budget counts all memory.
    if (first_of_plan_) runtime_.pool()->trim_idle_since(*first_of_plan_);
  });
  if (records_ && record_.varies && asked_for_pairs_) {
    runtime_.warn_of_no_pairs("micro-batches of a stage enter different units");
  }
  if (!records_ && turns_.draws)
    runtime_.planning().known.note_draws({options_.schedule, options_.stages});
  if (records_) {
    runtime_.know_step({options_.schedule, options_.stages}, std::move(record_), std::move(turns_));
  }
  finished_ = true;
  held_.reset();
  runtime_.end_scope();
}

// -------------------------------------------------------------------------------------- what comes

OpenStep::Stage& OpenStep::stage_of(int stage, const char* what) {
  TESSERA_CHECK(stage >= 0 && stage < options_.stages, ErrorKind::kUsage, what, ": found ",
                named(stage), ", expected 0 to ", options_.stages - 1,
                ", as StepScopeOptions::stages says");
  return stages_[static_cast<std::size_t>(stage)];
}

OpenStep::MicroBatch& OpenStep::micro_batch_of(int stage, std::int64_t micro_batch,
                                               const char* what) {
  auto& all = stage_of(stage, what).micro_batches;
  const auto found = all.find(micro_batch);
  TESSERA_CHECK(found != all.end(), ErrorKind::kUsage, what, ": found ", named(stage, micro_batch),
                ", expected one that had its forward in this step");
  return found->second;
}

void OpenStep::start(UnderWay& under, Action action) {
  now_ = &under;
  under = {.action = action,
           .marks = &stages_[static_cast<std::size_t>(action.stage)].marks,
           .turns_before = comm::Turns::passed(),
           .drew_before = checkpoints_that_drew()};
  log_.push_back(action);
  if (!records_ && action.kind == Kind::kForward) follow(under, &MicroBatchPlan::forward);
}

/// Leaves nothing under way there.
void OpenStep::reset(UnderWay& under) { under = {.marks = &base_marks_}; }

void OpenStep::end_action() {
  now_ = &forward_;
  if (forward_.action.kind == Kind::kForward) end_forward();
  now_ = &backward_;
  if (backward_.action.kind == Kind::kBackward && !backward_.action.began) {
    // No result of this rank required a gradient; the collectives are issued all the same.
    failing(runtime_, [&] {
      plan_backward(nullptr);
      end_backward();
    });
  }
  reset(forward_);
  reset(backward_);
}

void OpenStep::end_forward() {
  const auto& action = forward_.action;
  auto& record = record_.stages[static_cast<std::size_t>(action.stage)];
  // A checkpoint draws the same numbers again while the other pass of a pair computes.
  turns_.draws = turns_.draws || forward_.drew_before != checkpoints_that_drew();
  if (!records_) {
    if (action.parts < record.parts.size()) {
      leave_record("no other forward",
                   concat("one that begins with ", name_of(record.parts, action.parts, 0)));
    }
    return;
  }
  const auto& parts = micro_batch_of(forward_).parts;
  TESSERA_CHECK(!parts.empty(), ErrorKind::kUsage, "StepScope::begin_forward of ",
                named(action.stage, action.micro_batch),
                ": found no forward of the model after it, expected one before the next call");
  auto& turns = turns_.stages[static_cast<std::size_t>(action.stage)];
  count_turns(forward_, turns.forward, /*is_first=*/record.parts.empty());
  if (record.parts.empty()) {
    record.parts = parts;
  } else if (record.parts != parts) {
    record_.varies = true;
  }
  use_units(action.stage, parts);
}

void OpenStep::use_units(int stage, const std::vector<Trace>& parts) {
  auto& units = stages_[static_cast<std::size_t>(stage)].units;
  for (const auto unit : first_entries(parts, owners_)) {
    const auto bit = std::uint64_t{1} << stage;
    if ((units_.at(unit).users & bit) != 0) continue;
    units_[unit].users |= bit;
    units.push_back(unit);
  }
}

void OpenStep::begin_forward(int stage, std::int64_t micro_batch) {
  require_open("StepScope::begin_forward");
  end_action();
  UnitHere::enter(stage, static_cast<std::uint32_t>(micro_batch));
  start_forward(stage, micro_batch);
}

void OpenStep::start_forward(int stage, std::int64_t micro_batch) {
  constexpr auto kWhat = "StepScope::begin_forward";
  auto& of = stage_of(stage, kWhat);
  require_not_resharded(stage, micro_batch, kWhat);
  require_not_reduced(stage, micro_batch, kWhat);
  require_next(of, micro_batch);
  const auto index = std::ssize(of.micro_batches);
  const auto [one, is_new] = of.micro_batches.try_emplace(micro_batch);
  TESSERA_CHECK(is_new, ErrorKind::kUsage, kWhat, ": found ", named(stage, micro_batch),
                " a second time, expected one forward of it");
  one->second.which = class_of(index, options_.micro_batches.value_or(0));
  start(forward_, {.kind = Kind::kForward, .stage = stage, .micro_batch = micro_batch});
}

/// Requires that micro-batches come one after the other where their number is known.
void OpenStep::require_next(const Stage& stage, std::int64_t micro_batch) const {
  if (!options_.micro_batches) return;
  constexpr auto kWhat = "StepScope::begin_forward";
  TESSERA_CHECK(std::ssize(stage.micro_batches) < *options_.micro_batches, ErrorKind::kUsage, kWhat,
                ": found micro-batch ", micro_batch, " after ", *options_.micro_batches,
                ", expected no more than StepScopeOptions::micro_batches says");
  for (const auto& [number, one] : stage.micro_batches) {
    TESSERA_CHECK(one.state == State::kDone, ErrorKind::kUsage, kWhat, ": found micro-batch ",
                  micro_batch, " before the backward of ", number,
                  ", expected it after that, as StepScopeOptions::micro_batches says");
  }
}

void OpenStep::require_not_resharded(int stage, std::int64_t micro_batch, const char* what) {
  TESSERA_CHECK(!stage_of(stage, what).resharded, ErrorKind::kUsage, what, ": found ",
                named(stage, micro_batch), " after reshard() of the stage, expected it before");
}

void OpenStep::require_not_reduced(int stage, std::int64_t micro_batch, const char* what) {
  TESSERA_CHECK(options_.sync_every_micro_batch || !stage_of(stage, what).reduced,
                ErrorKind::kUsage, what, ": found ", named(stage, micro_batch),
                " after reduce() of the stage, expected it before; reduce a stage after its last "
                "weight gradients, or set sync_every_micro_batch");
}

void OpenStep::begin_backward(int stage, std::int64_t micro_batch, Backward backward) {
  require_open("StepScope::begin_backward");
  end_action();
  UnitHere::enter(stage, static_cast<std::uint32_t>(micro_batch));
  start_backward(stage, micro_batch, backward);
}

void OpenStep::require_may_run_backward(int stage, std::int64_t micro_batch, Backward backward,
                                        const char* what) {
  const auto& one = micro_batch_of(stage, micro_batch, what);
  TESSERA_CHECK(one.state == State::kForward, ErrorKind::kUsage, what, ": found ",
                named(stage, micro_batch), " a second time, expected one backward of it");
  require_not_resharded(stage, micro_batch, what);
  require_not_reduced(stage, micro_batch, what);
  TESSERA_CHECK(!options_.micro_batches || backward == Backward::kFull, ErrorKind::kUsage, what,
                ": found kInputOnly, expected kFull where the number of micro-batches is given, "
                "since gradients are reduced while the last backward runs; leave "
                "StepScopeOptions::micro_batches out and call reduce()");
}

void OpenStep::start_backward(int stage, std::int64_t micro_batch, Backward backward) {
  require_may_run_backward(stage, micro_batch, backward, "StepScope::begin_backward");
  start(
      backward_,
      {.kind = Kind::kBackward, .stage = stage, .micro_batch = micro_batch, .backward = backward});
}

void OpenStep::run_weight_gradients(int stage, std::int64_t micro_batch) {
  constexpr auto kWhat = "StepScope::run_weight_gradients";
  require_open(kWhat);
  end_action();
  auto& one = micro_batch_of(stage, micro_batch, kWhat);
  TESSERA_CHECK(one.state != State::kForward, ErrorKind::kUsage, kWhat, ": found ",
                named(stage, micro_batch),
                " before its backward, expected a Backward::kInputOnly first");
  TESSERA_CHECK(one.state != State::kDone, ErrorKind::kUsage, kWhat, ": found ",
                named(stage, micro_batch),
                ", whose weight gradients were formed, expected one after each "
                "Backward::kInputOnly and none after a kFull");
  require_not_reduced(stage, micro_batch, kWhat);
  start(backward_, {.kind = Kind::kWeights, .stage = stage, .micro_batch = micro_batch});
  failing(runtime_, [&] { runtime_.store().run({stage, micro_batch}); });
  one.state = State::kDone;
  mark_dirty(stage);
  end_action();
}

bool OpenStep::all_have_run() const {
  return std::ranges::none_of(stages_, [](const Stage& stage) { return stage.units.empty(); });
}

/// Whether all stages that use the unit are in `said`. False until all stages have run.
bool OpenStep::is_last_user(std::uint64_t said, const OfUnit& of) const {
  return all_have_run() && (said & of.users) == of.users;
}

bool OpenStep::is_over(const Stage& stage) {
  return stage.resharded && std::ranges::none_of(stage.micro_batches, [](const auto& one) {
           return one.second.state == State::kInputDone;
         });
}

void OpenStep::reshard(int stage) {
  constexpr auto kWhat = "StepScope::reshard";
  require_open(kWhat);
  end_action();
  auto& of = stage_of(stage, kWhat);
  TESSERA_CHECK(!of.resharded, ErrorKind::kUsage, kWhat, ": found ", named(stage),
                " a second time, expected it once");
  start(backward_, {.kind = Kind::kReshard, .stage = stage});
  of.resharded = true;
  failing(runtime_, [&] {
    for (const auto id : of.units) {
      units_[id].resharded |= std::uint64_t{1} << stage;
      auto& unit = *runtime_.units().at(id);
      if (is_last_user(units_[id].resharded, units_[id]) &&
          !unit.keeps_unsharded_after_backward()) {
        unit.release();
      }
    }
  });
  end_action();
}

/// Marks the units of the stage as dirty, except those that the pass under way has reduced.
void OpenStep::mark_dirty(int stage) {
  for (const auto id : stages_[static_cast<std::size_t>(stage)].units) units_[id].dirty = true;
  if (backward_.pass.plan == nullptr) return;
  for (const auto& [kind, id] : backward_.pass.plan->actions) {
    if (kind == PlanAction::Kind::kReduce) units_[id].dirty = false;
  }
}

void OpenStep::reduce(int stage) {
  constexpr auto kWhat = "StepScope::reduce";
  require_open(kWhat);
  end_action();
  auto& of = stage_of(stage, kWhat);
  if (!options_.sync_every_micro_batch) {
    TESSERA_CHECK(!of.reduced, ErrorKind::kUsage, kWhat, ": found ", named(stage),
                  " a second time, expected it once, or sync_every_micro_batch");
    const auto is_of_stage = [&](const grad::SlotOwner& owner, grad::WeightGradGroup group) {
      if (group.stage >= 0) return group.stage == stage;
      return std::ranges::any_of(of.units, [&](UnitId id) {
        return std::ranges::any_of(runtime_.units().at(id)->buckets(),
                                   [&](const auto& bucket) { return bucket.get() == &owner; });
      });
    };
    runtime_.sink().require_redeemed(kWhat, is_of_stage);
    for (const auto& [number, one] : of.micro_batches) {
      TESSERA_CHECK(one.state != State::kInputDone, ErrorKind::kUsage, kWhat, ": found ",
                    named(stage, number),
                    " without its run_weight_gradients(), expected the stage's last one before");
    }
  }
  start(backward_, {.kind = Kind::kReduce, .stage = stage});
  of.reduced = true;
  // These stages form no more gradients.
  std::uint64_t over = 0;
  for (int i = 0; i < options_.stages; ++i) {
    if (is_over(stages_[static_cast<std::size_t>(i)])) over |= std::uint64_t{1} << i;
  }
  failing(runtime_, [&] {
    for (auto id = of.units.rbegin(); id != of.units.rend(); ++id) {
      auto& unit = units_[*id];
      unit.reduced |= std::uint64_t{1} << stage;
      if (!is_last_user(unit.reduced, unit)) continue;
      unit.reduced &= over;
      if (!std::exchange(unit.dirty, false)) continue;
      runtime_.reduce(*runtime_.units().at(*id), /*is_shown_next=*/false);
    }
  });
  end_action();
}

}  // namespace tessera::fsdp
