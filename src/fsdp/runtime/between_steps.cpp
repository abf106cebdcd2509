// The runtime between steps: the user's controls, checks that earlier work has ended, and failures.
#include "base/doing.h"
#include "base/log.h"
#include "base/text/printable.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/error.h"

namespace tessera::fsdp {

// --------------------------------------------------------------------------------------- controls

Controls Runtime::controls() const {
  const auto names = [](const std::vector<std::weak_ptr<Unit>>& list) {
    std::vector<std::string> shown;
    for (const auto& one : list) {
      const auto unit = one.lock();
      shown.push_back(unit && unit->has_handle() ? unit->shown_name() : "(gone)");
    }
    return shown;
  };
  Controls all{switches_, {}};
  // Inside a step, StepScope::begin_backward() says for each backward whether it defers.
  all.model.defers_weight_gradients = step_ == nullptr && sink_.store() != nullptr;
  for (const auto* unit : units_) {
    all.units.push_back({unit->shown_name(), unit->controls, names(unit->forward_prefetch),
                         names(unit->backward_prefetch)});
  }
  return all;
}

const std::string& Runtime::controls_as_text() {
  if (controls_known_) return controls_;
  controls_ = to_string(controls());
  marks_ = concat(model_, controls_.empty() ? "" : ", ", controls_);
  controls_known_ = true;
  return controls_;
}

const std::string& Runtime::marks() {
  if (step_ != nullptr) return step_->marks();
  controls_as_text();
  return marks_;
}

void Runtime::agree_on_controls() {
  const auto found =
      comm::first_that_differs(*data_group(), controls_as_text(), "runtime controls");
  if (!found) return;
  const auto shown = [](const std::string& text) { return text.empty() ? "none" : text; };
  throw Error(ErrorKind::kUsage,
              concat("runtime controls differ between ranks: rank 0 has set ",
                     shown(found->of_first), ", rank ", found->rank, " ", shown(found->of_rank),
                     "; set the same ones on every rank, at the same place"));
}

void Runtime::set_requires_replica_reduce(bool value) {
  require_no_step("set_requires_replica_reduce");
  switches_.requires_replica_reduce = value;
  controls_changed();
}

void Runtime::set_planner(Planner planner, RecomputeMode while_recording) {
  require_no_step("compile");
  planning_.planner = std::move(planner);
  planning_.while_recording = while_recording;
  ++planning_.planners;
  planning_.known.forget_plans();
}

comm::Turns& Runtime::turns() { return turns_ ? *turns_ : turns_.emplace(device()); }

void Runtime::warn_of_no_pairs(const std::string& why) {
  if (std::exchange(warned_of_no_pairs_, true) || world().rank() != 0) return;
  log::warn("StepScope::run_pair: found that ", why,
            ": the backward and the forward of a pair run one after the other");
}

void Runtime::know_step(const KnownSteps::Schedule& schedule, StepRecord record, StepTurns turns) {
  if (!record.is_complete()) return planning_.known.forget(schedule);
  planning_.known.put(schedule, std::move(record), std::move(turns));
  if (!planning_.known.are_all_new() || std::exchange(warned_of_schedules_, true)) return;
  if (world().rank() != 0) return;
  log::warn("StepScope: found ", KnownSteps::kMost,
            " steps in a row with a schedule that was not there before, the last one \"",
            schedule.first,
            "\", so that none followed a plan; give steps that run the same calls the same "
            "StepScopeOptions::schedule");
}

void Runtime::require_not_compiled(const std::string& what) const {
  TESSERA_CHECK(!planning_.planner && regions_ == nullptr, ErrorKind::kUsage, what,
                ": found a module that compile() was called on, whose plans and regions would be "
                "gone, expected one without; call compile() on the outermost module, when all are "
                "sharded");
}

void Runtime::set_regions(std::shared_ptr<grad::Regions> regions) {
  require_no_step("compile");
  regions_ = std::move(regions);
}

PlanUnit Runtime::plan_unit(const Unit& unit) const {
  const auto ids = [&](const std::vector<std::weak_ptr<Unit>>& named, const char* control) {
    std::vector<UnitId> list;
    for (const auto& one : living(named, control, unit)) list.push_back(one->id());
    return list;
  };
  PlanUnit of;
  of.gathers = !unit.buckets().empty() && !unit.always_unsharded();
  of.gathers_in_backward = unit.controls.unshard_in_backward;
  of.gathered = of.gathers && (unit.gathered() || unit.gather_pending());
  of.reduces = unit.trainable() && unit.controls.requires_sync;
  for (const auto& owner : unit.owners) of.owners.push_back(owner->id());
  of.forward_prefetch = ids(unit.forward_prefetch, "set_forward_prefetch");
  of.backward_prefetch = ids(unit.backward_prefetch, "set_backward_prefetch");
  return of;
}

std::vector<PlanUnit> Runtime::plan_units() const {
  std::vector<PlanUnit> units;
  for (const auto* unit : units_) {
    auto& of = units.emplace_back(plan_unit(*unit));
    of.name = unit->shown_name();
    for (const auto& bucket : unit->buckets()) {
      if (!bucket->aliases_shard()) of.bytes += layout::gathered_bytes(bucket->plan());
    }
    if (const auto module = unit->recomputable.lock()) {
      of.recompute_by = module->own_recompute() ? RecomputeBy::kUser : RecomputeBy::kPlan;
    }
  }
  return units;
}

std::vector<RecomputeMode> Runtime::own_recompute() const {
  std::vector<RecomputeMode> modes;
  for (const auto* unit : units_) {
    const auto module = unit->recomputable.lock();
    const auto own = module ? module->own_recompute() : std::nullopt;
    modes.push_back(own.value_or(RecomputeMode::kNone));
  }
  return modes;
}

void Runtime::follow_recompute(const std::vector<RecomputeMode>& modes) {
  followed_.clear();
  for (std::size_t i = 0; i < units_.size(); ++i) {
    const auto module = units_[i]->recomputable.lock();
    if (module) module->follow_recompute(modes.at(i));
    followed_.push_back(module ? module->recompute() : RecomputeMode::kNone);
  }
}

void Runtime::end_following() {
  for (const auto* unit : units_) {
    if (const auto module = unit->recomputable.lock()) {
      module->follow_recompute(RecomputeMode::kNone);
    }
  }
}

void Runtime::set_is_last_backward(bool value) {
  require_no_step("set_is_last_backward");
  switches_.is_last_backward = value;
  controls_changed();
}

void Runtime::set_defer_weight_gradients(bool value) {
  renew_after_failure();
  require_idle("set_defer_weight_gradients");
  sink_.set_store(value ? &store_ : nullptr);
  controls_changed();
}

void Runtime::run_weight_gradients() {
  renew_after_failure();
  require_no_step("run_weight_gradients");
  try {
    store_.run();
    if (awaiting_tickets_ && sink_.store() != nullptr && !any_rank_has_tickets())
      settle_gradients();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

void Runtime::forget_cleared() {
  // Deferred gradients may still wait to be reduced, or to be published.
  if (in_backward_ || awaiting_tickets_ || step_ != nullptr || has_failed()) return;
  publisher_.forget_cleared();
}

// --------------------------------------------------------------------------- what must have ended

void Runtime::require_no_step(const char* what) const {
  TESSERA_CHECK(step_ == nullptr || has_failed(), ErrorKind::kUsage, what,
                ": found a StepScope that is open, expected none, since inside a step weights, "
                "gradients and controls stay as they are; call it before the scope or after its "
                "finish()");
}

void Runtime::require_idle(const char* what) const {
  require_no_step(what);
  const int pending = *outstanding_;
  TESSERA_CHECK(
      pending == 0, ErrorKind::kUsage, what, ": found ", pending,
      " unit forwards whose backward has not run, expected none; run backward first, or let the "
      "loss go out of scope");
  require_none_deferred(what);
}

void Runtime::require_none_deferred(const char* what) const {
  require_no_step(what);
  sink_.require_all_redeemed(what);
  TESSERA_CHECK(!awaiting_tickets_, ErrorKind::kUsage, what,
                ": found gradients that were deferred, on this rank or another, expected none; "
                "call run_weight_gradients() on every rank first");
}

void Runtime::require_reduced(const char* what) const {
  require_none_deferred(what);
  TESSERA_CHECK(!waits_for_last_, ErrorKind::kUsage, what,
                ": found reductions that wait for the last backward, expected none; call "
                "set_is_last_backward(true) before the step's last backward");
}

void Runtime::require_whole_sums(const char* what) {
  renew_after_failure();
  require_idle(what);
  require_synced(what);
}

void Runtime::require_between_steps(const char* what) {
  require_whole_sums(what);
  for (const auto* unit : units_) {
    for (const auto& parameter : unit->parameters()) {
      TESSERA_CHECK(!parameter->shard.grad().defined(), ErrorKind::kUsage, what,
                    ": found a gradient of ", parameter->contract.name,
                    ", expected none between steps; call zero_grad() first");
    }
  }
}

void Runtime::require_synced(const char* what) const {
  require_reduced(what);
  for (const auto* unit : units_) {
    TESSERA_CHECK(!unit->progress_.pending && !unit->progress_.unpublished, ErrorKind::kUsage, what,
                  ": found micro-batches whose gradients wait to be reduced in ",
                  unit->shown_name(),
                  ", expected none; run the last one with set_requires_gradient_sync(true) and "
                  "set_requires_replica_reduce(true) first");
  }
}

void Runtime::require_none_lost(const char* what) const {
  for (const auto* unit : units_) {
    for (const auto& p : unit->parameters()) {
      TESSERA_CHECK(!p->lost, ErrorKind::kUsage, what, ": found that the gradient which ",
                    p->contract.name,
                    " had before the failure is gone, expected the whole step's; call zero_grad() "
                    "and run all of its micro-batches again");
    }
  }
}

void Runtime::set_loss_scale(double scale, const char* what) {
  if (scale == switches_.loss_scale) return;
  require_whole_sums(what);
  switches_.loss_scale = scale;
  controls_changed();
  publisher_.rescaled();
}

// --------------------------------------------------------------------------------------- failures

bool Runtime::has_failed() const {
  return failed_ || abandoned_ == generation_ || recoveries_ != world().recoveries();
}

void Runtime::renew_after_failure() {
  take_up_abandoned();
  // All ranks reset after a recovery, also those that had nothing under way.
  if (has_failed() && !world().aborted()) reset();
}

void Runtime::fail(const std::string& why) {
  end_step();
  if (world().size() > 1) world().abort(one_line(why) + DoingHere::as_text());
}

void Runtime::take_up_abandoned() {
  if (abandoned_ == generation_) end_step();
}

std::shared_ptr<OpenStep> Runtime::open_step(StepScopeOptions options) {
  constexpr auto kWhat = "StepScope";
  OpenStep::check(options, kWhat);
  check_usable();
  require_idle(kWhat);
  TESSERA_CHECK(!is_under_way(), ErrorKind::kUsage, kWhat,
                ": found a forward or backward under way, expected none where a step begins");
  TESSERA_CHECK(sink_.store() == nullptr, ErrorKind::kUsage, kWhat,
                ": found set_defer_weight_gradients(true), expected false, since inside a step "
                "each backward chooses (Backward::kInputOnly)");
  auto step = std::make_shared<OpenStep>(*this, std::move(options), ++steps_);
  release_leftovers();
  // Comes before release_stale(), so that this call reports where ranks keep different units: only
  // ranks that keep a unit take part in the collective of release_stale().
  step->agree_at_begin();
  release_stale();
  step->choose_plan();
  step->settle_into();
  pool_->begin_step();
  return step_ = step;
}

bool Runtime::is_open(const OpenStep& step) {
  take_up_abandoned();
  return step_.get() == &step;
}

void Runtime::give_up(const OpenStep& step) {
  if (!is_open(step)) return;
  if (!has_failed() && !world().aborted()) return fail("a StepScope ended without finish()");
  end_step();
}

void Runtime::end_scope() {
  if (step_ == nullptr) return;
  UnitHere::leave_step();
  sink_.set_store(nullptr);
  forwards_.forget_steps();
  step_.reset();
  end_following();
}

void Runtime::end_step() {
  end_scope();
  planning_.known.clear();
  failed_ = true;
  ++generation_;
  forwards_.abandon();
  spans_.forget();
  repeated_.forget();
  kept_ = nullptr;
  under_way_.clear();
}

void Runtime::reset() {
  end_scope();
  planning_.known.clear();
  // Everything under way when the run failed is lost: nothing waits for it.
  reducer_.drop_all();
  sink_.drop_tickets();
  store_.drop();
  under_exchange_.drop();
  for (auto* unit : units_) {
    unit->abandon_gather();
    unit->progress_ = {};
    unit->expected_ = std::make_shared<std::atomic<int>>(0);
    for (auto& bucket : unit->buckets()) bucket->drop_gradients();
    for (auto& p : unit->parameters()) {
      // A published gradient is part of a sum that is lost.
      p->lost = p->lost || (p->published && p->shard.grad().defined());
      if (p->published) p->shard.mutable_grad().reset();
      p->seen_grad = at::Tensor();
      p->used = p->published = false;
    }
  }
  // Graphs that the user still holds belong to a step that is lost, and keep the old counters.
  outstanding_ = std::make_shared<std::atomic<int>>(0);
  if (!has_scaler_) switches_.loss_scale = 1.0;
  controls_changed();
  ++generation_;
  recoveries_ = world().recoveries();
  agreed_ = false;
  forwards_ = {};
  kept_ = nullptr;
  under_way_.clear();
  in_backward_ = false;
  failed_ = awaiting_tickets_ = holds_reductions_ = waits_for_last_ = false;
}

}  // namespace tessera::fsdp
