// Runs the actions of passes. issue_gather() and reduce() issue every gather and every reduction,
// also those outside of a plan: in a forward without a plan, for unshard(), and in
// settle_gradients().
#include "fsdp/runtime/pass.h"

#include <algorithm>
#include <utility>

#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::size_t BackwardUnderWay::part_of(const Entry& entry) const {
  const auto found = std::ranges::find(forwards, entry.segment->forward->number);
  return static_cast<std::size_t>(found - forwards.begin());
}

std::vector<PassedPlace>::const_iterator BackwardUnderWay::find(const PassedPlace& place) const {
  return std::find(places.begin() + static_cast<std::ptrdiff_t>(passed), places.end(), place);
}

void BackwardUnderWay::note_passed(const PassedPlace& place) {
  if (const auto found = find(place); found != places.end()) {
    passed = static_cast<std::size_t>(found - places.begin());
  }
}

void Runtime::begin_place(Pass& pass, const PlanPlace& place, Unit& unit) {
  advance(pass, place.needed);
  make_readable(unit, Gathers::kByPlan);
  advance(pass, place.ahead);
}

void Runtime::advance(Pass& pass, std::size_t count) {
  while (pass.done < count) {
    const auto& [kind, id] = pass.plan->actions.at(pass.done++);
    auto& unit = *units_.at(id);
    switch (kind) {
      case PlanAction::Kind::kGatherShared:
        pass.hold(id, true);
        if (unit.gathered() || unit.gather_pending()) break;  // by another stage's plan
        [[fallthrough]];
      case PlanAction::Kind::kGather:
        pass.hold(id, true);
        if (pass.paired != nullptr && pass.paired->has(id)) break;  // by the other pass of the pair
        // A repeated forward before this backward has gathered it, on all ranks.
        if (std::exchange(unit.progress_.gathered_again, false)) break;
        // Outside of a step, a backward inside this one may have gathered it.
        TESSERA_INVARIANT(step_ == nullptr || !(unit.gathered() || unit.gather_pending()), "unit ",
                          unit.shown_name(), " is gathered where its plan gathers it");
        issue_gather(unit, pass.number);
        break;
      case PlanAction::Kind::kWait:
        if (!unit.gathered() && unit.gather_pending()) unit.wait_gather();
        break;
      case PlanAction::Kind::kKeepToBackward:
      case PlanAction::Kind::kKeepToUpdate:
        break;  // it stays until its release
      case PlanAction::Kind::kRecompute:
        break;  // the module does this by itself in its backward
      case PlanAction::Kind::kRelease:
        pass.hold(id, false);
        if (pass.paired != nullptr && pass.paired->has(id)) break;  // the other pass reads it
        unit.release();
        break;
      case PlanAction::Kind::kReduce:
        reduce(unit, step_ == nullptr && switches_.is_last_backward);
        break;
    }
  }
}

/// Makes the unit readable, and the units that own parameters of it.
void Runtime::make_readable(Unit& unit, Gathers gathers) {
  const bool here = gathers == Gathers::kHere;
  const auto make = [&](Unit& one) {
    check_integrity(one);
    if (one.gathered()) return one.read_here();
    if (here && !one.gather_pending()) issue_gather(one, number_of_forward());
    if (here || one.gather_pending() || one.always_unsharded() || one.buckets().empty()) {
      return one.wait_gather();
    }
    TESSERA_CHECK(!one.controls.unshard_in_backward, ErrorKind::kInternal, "backward of unit ",
                  one.shown_name(),
                  ": found its parameters released, expected them gathered before it began");
  };
  for (const auto& owner : unit.owners) make(*owner);
  make(unit);
}

void Runtime::issue_gather(Unit& unit, std::uint32_t number) {
  TESSERA_CHECK(unit.has_values(), ErrorKind::kUsage, "unit ", unit.shown_name(),
                ": found parameters that never got values, expected them loaded; fill shards() and "
                "call set_loaded(), or load_state_dict()");
  if (unit.always_unsharded() || unit.buckets().empty()) return;
  ++gathers_issued_;
  unit.begin_gather(number);
}

void Runtime::reduce(Unit& unit, bool is_shown_next) {
  if (!unit.trainable()) return;
  auto& progress = unit.progress_;
  // A gradient that a layer defers by itself delays all reductions that follow, so that reductions
  // keep their order. In a step, begin_backward() says whether the backward defers.
  holds_reductions_ = holds_reductions_ || (step_ == nullptr && progress.tickets > 0);
  progress.pending = holds_reductions_ || !unit.controls.requires_sync;
  if (progress.pending) return;
  progress.reduced = true;
  reducer_.free_wires(unit);  // of earlier micro-batches
  if (!is_shown_next) Publisher::leave_shown_sums(unit);
  reducer_.issue(queue(), unit, marks());
}

}  // namespace tessera::fsdp
