#include "fsdp/agreed/pass_planner.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace tessera::fsdp {
namespace {

using Kind = PlanAction::Kind;

}  // namespace

PassPlanner::PassPlanner(const StageRecord& record, const std::vector<PlanUnit>& units,
                         const PlanChoices& choices, const std::vector<bool>& shared)
    : record_(record), units_(units), choices_(choices), shared_(shared) {
  // Which stage comes first to a unit that several stages use is not known, so it counts as
  // sharded.
  for (const auto unit : units_of_stage(record, units)) {
    if (units[unit].gathered && !shared[unit]) gathered_.insert(unit);
  }
}

void PassPlanner::gather(PassPlan& pass, UnitId unit) {
  if (!units_.at(unit).gathers || !gathered_.insert(unit).second) return;
  pending_.insert(unit);
  const bool others_may_have = shared_.at(unit) && (stays(unit) || units_[unit].gathered);
  pass.actions.push_back({others_may_have ? Kind::kGatherShared : Kind::kGather, unit});
}

void PassPlanner::wait(PassPlan& pass, UnitId unit) {
  if (pending_.erase(unit) != 0) pass.actions.push_back({Kind::kWait, unit});
}

void PassPlanner::release(PassPlan& pass, UnitId unit) {
  if (gathered_.erase(unit) == 0) return;
  pending_.erase(unit);
  pass.actions.push_back({Kind::kRelease, unit});
}

/// Releases the units that are kept for less than `until`, unused prefetches included, and waits
/// for the others: no gather is under way from one pass to the next.
void PassPlanner::end_pass(PassPlan& pass, Keep until) {
  for (const auto unit : std::vector<UnitId>(gathered_.begin(), gathered_.end())) {
    if (choices_.keep.at(unit) < until) release(pass, unit);
  }
  for (const auto unit : std::vector<UnitId>(pending_.begin(), pending_.end())) wait(pass, unit);
}

// ---------------------------------------------------------------------------------------- forward

PassPlan PassPlanner::forward() {
  PassPlan pass;
  for (const auto& part : record_.parts) {
    auto& places = pass.places.emplace_back(part.units.size());
    std::vector<int> open(units_.size(), 0);
    for (const auto& [position, enters] : trace_events(part)) {
      const auto unit = part.units[position];
      auto& place = places[position];
      if (enters) {
        ++open.at(unit);
        for_owners_and(unit, [&](UnitId one) { gather(pass, one); });
        for_owners_and(unit, [&](UnitId one) { wait(pass, one); });
        place.needed = pass.actions.size();
        prefetch(pass, part, position);
        place.ahead = pass.actions.size();
      } else {
        if (--open[unit] == 0) end_forward_of(pass, unit);
        const bool is_outermost = std::ranges::all_of(open, [](int count) { return count == 0; });
        if (is_outermost) end_pass(pass, Keep::kBackward);
        place.after = pass.actions.size();
      }
    }
  }
  return pass;
}

void PassPlanner::prefetch(PassPlan& pass, const Trace& part, std::size_t position) {
  const auto& named = units_.at(part.units[position]).forward_prefetch;
  if (named.empty()) {
    const auto end = std::min(part.units.size(), position + 1 + choices_.ahead_in_forward);
    for (auto next = position + 1; next < end; ++next) gather(pass, part.units[next]);
  }
  for (const auto unit : named) gather(pass, unit);
}

void PassPlanner::end_forward_of(PassPlan& pass, UnitId unit) {
  if (!units_.at(unit).gathers || !gathered_.contains(unit)) return;
  switch (choices_.keep.at(unit)) {
    case Keep::kNot:
      return release(pass, unit);
    case Keep::kBackward:
      pass.actions.push_back({Kind::kKeepToBackward, unit});
      return;
    case Keep::kUpdate:
      // One action in a step is enough.
      if (kept_.insert(unit).second) pass.actions.push_back({Kind::kKeepToUpdate, unit});
      return;
  }
}

// --------------------------------------------------------------------------------------- backward

/// Plans one backward, place by place.
class PassPlanner::Backward {
 public:
  Backward(PassPlanner& planner, bool reduces)
      : planner_(planner),
        record_(planner.record_),
        units_(planner.units_),
        reduces_(reduces),
        places_(backward_places(record_)),
        use_of_(units_.size()) {
    for (const auto& part : record_.parts) pass_.places.emplace_back(part.units.size());
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const auto& place = places_[i];
      if (place.begins && is_reached(place)) uses_.push_back({place});
      if (place.begins) continue;
      planner_.for_owners_and(unit_of(place), [&](UnitId unit) { use_of_.at(unit).last = i; });
    }
  }

  PassPlan plan() {
    for (now_ = 0; now_ < places_.size(); ++now_) {
      places_[now_].begins ? begin(places_[now_]) : end(places_[now_]);
    }
    planner_.end_pass(pass_, Keep::kUpdate);
    return std::move(pass_);
  }

 private:
  /// A place where a unit's parameters are needed.
  struct Use {
    PassedPlace place;
    bool secured = false;  ///< gathered for this use, or known to be gathered
  };
  struct UseOf {
    int active = 0;        ///< number of its backwards that have begun
    int secured = 0;       ///< number of secured uses that have not begun
    std::size_t last = 0;  ///< place after which it gets no gradient
  };

  UnitId unit_of(const PassedPlace& place) const {
    return record_.parts[place.part].units[place.position];
  }
  bool is_reached(const PassedPlace& place) const {
    return !record_.reached.empty() && record_.reached.at(place.part).at(place.position);
  }
  PlanPlace& counts_of(const PassedPlace& place) {
    return pass_.places[place.part][place.position];
  }

  void secure(Use& use) {
    if (use.secured) return;
    use.secured = true;
    planner_.for_owners_and(unit_of(use.place), [&](UnitId unit) {
      ++use_of_.at(unit).secured;
      if (units_[unit].gathers_in_backward) planner_.gather(pass_, unit);
    });
  }

  void begin(const PassedPlace& place) {
    auto& counts = counts_of(place);
    const auto unit = unit_of(place);
    const bool is_used = is_reached(place);
    if (is_used) {
      secure(uses_[next_use_++]);
      planner_.for_owners_and(unit, [&](UnitId one) {
        --use_of_[one].secured;
        ++use_of_[one].active;
        planner_.wait(pass_, one);
      });
    }
    counts.needed = pass_.actions.size();
    if (is_used) {
      prefetch(unit);
      // Gathers ahead are issued first, so that they overlap with the recomputation.
      const auto& recompute = planner_.choices_.recompute;
      if (!recompute.empty() && recompute.at(unit) != RecomputeMode::kNone) {
        pass_.actions.push_back({Kind::kRecompute, unit});
      }
    }
    counts.ahead = pass_.actions.size();
  }

  void prefetch(UnitId unit) {
    const auto& wanted = units_[unit].backward_prefetch;
    if (wanted.empty()) {
      const auto end = std::min(next_use_ + planner_.choices_.ahead_in_backward, uses_.size());
      for (auto use = next_use_; use < end; ++use) secure(uses_[use]);
    }
    for (const auto id : wanted) {
      const auto use =
          std::find_if(uses_.begin() + static_cast<std::ptrdiff_t>(next_use_), uses_.end(),
                       [&](const Use& one) { return !one.secured && unit_of(one.place) == id; });
      if (use != uses_.end()) secure(*use);
    }
  }

  void end(const PassedPlace& place) {
    const auto unit = unit_of(place);
    if (is_reached(place)) {
      planner_.for_owners_and(unit, [&](UnitId one) { --use_of_[one].active; });
      const bool is_free = use_of_[unit].active == 0 && use_of_[unit].secured == 0;
      if (is_free && units_[unit].gathers && !planner_.stays(unit)) planner_.release(pass_, unit);
    }
    reduce_after(unit);
    for (const auto owner : units_[unit].owners) reduce_after(owner);
    counts_of(place).after = pass_.actions.size();
  }

  void reduce_after(UnitId unit) {
    if (!reduces_ || !units_[unit].reduces || use_of_[unit].last != now_) return;
    pass_.actions.push_back({Kind::kReduce, unit});
  }

  PassPlanner& planner_;
  const StageRecord& record_;
  const std::vector<PlanUnit>& units_;
  const bool reduces_;
  const std::vector<PassedPlace> places_;
  std::size_t now_ = 0;        // index in places_
  std::vector<UseOf> use_of_;  // by unit
  std::vector<Use> uses_;
  std::size_t next_use_ = 0;
  PassPlan pass_;
};

PassPlan PassPlanner::backward(bool reduces) { return Backward(*this, reduces).plan(); }

PassPlan plan_backward(const StageRecord& record, std::vector<PlanUnit> units,
                       const std::vector<bool>& releases, std::size_t ahead) {
  for (auto& unit : units) {
    if (unit.gathers) continue;
    unit.gathers = unit.gathered = true;
    unit.gathers_in_backward = false;
  }
  PlanChoices choices;
  choices.ahead_in_backward = ahead;
  for (const bool one : releases) choices.keep.push_back(one ? Keep::kNot : Keep::kUpdate);
  return PassPlanner(record, units, choices, std::vector<bool>(units.size())).backward(true);
}

}  // namespace tessera::fsdp
