// PassPlanner plans the forwards and backwards of one stage, place by place. [Note: collective
// order]
//
// A forward passes the places of a trace in their order. Autograd runs nodes in reverse of the
// order in which forwards made them: a backward passes the ends of units' forwards in reverse of
// Trace::exits, so an outer unit comes before the units inside it, and beginnings in reverse of
// Trace::units; a checkpoint passes the ends of the units inside it first, in the order of the
// forward.
//
// A unit is gathered where it is needed and not gathered yet; prefetches are issued while another
// unit computes. In a backward a unit is released after each of its uses unless a later use has
// secured it, and reduced after the last one. A rank that skips a place, since it did not use a
// result, runs the actions of that place when it comes to a later one. So a rank that waits has run
// all actions before the one that it waits for, and the first action that any rank waits for is
// run by all.
//
// Pure: no torch header. Next: step_plan.h (the values), ../runtime/pass.h (which runs one).
#pragma once

#include <set>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

/// Makes the passes one after the other: each begins with what the one before left.
class PassPlanner {
 public:
  /// Everything outlives it. `shared`, by unit: other stages of the rank use it, too.
  PassPlanner(const StageRecord& record, const std::vector<PlanUnit>& units,
              const PlanChoices& choices, const std::vector<bool>& shared);

  PassPlan forward();
  PassPlan backward(bool reduces);

 private:
  class Backward;

  bool stays(UnitId unit) const { return choices_.keep.at(unit) == Keep::kUpdate; }
  void gather(PassPlan& pass, UnitId unit);
  void wait(PassPlan& pass, UnitId unit);
  void release(PassPlan& pass, UnitId unit);
  void prefetch(PassPlan& pass, const Trace& part, std::size_t position);
  void end_forward_of(PassPlan& pass, UnitId unit);
  void end_pass(PassPlan& pass, Keep until);
  template <class Act>
  void for_owners_and(UnitId unit, const Act& act) const {
    for (const auto owner : units_.at(unit).owners) act(owner);
    act(unit);
  }

  const StageRecord& record_;
  const std::vector<PlanUnit>& units_;
  const PlanChoices& choices_;
  const std::vector<bool>& shared_;
  std::set<UnitId> gathered_;  // or about to be
  std::set<UnitId> pending_;   // of these
  std::set<UnitId> kept_;      // to the update, with an action that says so
};

/// Plans one backward by itself, of units as they are when it begins. Units in `releases` are
/// released after each use; while a unit without a prefetch list computes, the next `ahead` units
/// are gathered. Units without a gather are released too, which waits for readers on other streams.
PassPlan plan_backward(const StageRecord& record, std::vector<PlanUnit> units,
                       const std::vector<bool>& releases, std::size_t ahead = 1);

}  // namespace tessera::fsdp
