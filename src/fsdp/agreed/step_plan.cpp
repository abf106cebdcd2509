#include "fsdp/agreed/step_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/fields_hash.h"
#include "base/text/printable.h"
#include "fsdp/agreed/backward_plan.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

using Kind = PlanAction::Kind;

/// The order in which a backward passes its places.
std::vector<PassedPlace> in_order(const BackwardPlan& plan) {
  std::map<std::size_t, PassedPlace> places;
  for (const auto& [part, of] : plan.places) {
    for (std::size_t i = 0; i < of.size(); ++i) {
      places[of[i].begins] = {part, i, true};
      places[of[i].ends] = {part, i, false};
    }
  }
  std::vector<PassedPlace> list;
  for (const auto& [when, place] : places) list.push_back(place);
  return list;
}

/// The forwards of a stage as a backward goes through them, newest first. `reached`: none, nowhere.
std::vector<ReachedForward> newest_first(const std::vector<Trace>& parts,
                                         const std::vector<Reach>& reached) {
  std::vector<ReachedForward> forwards;
  for (std::size_t part = parts.size(); part-- > 0;) {
    forwards.push_back({static_cast<std::uint32_t>(part), &parts[part],
                        reached.empty() ? Reach(parts[part].units.size()) : reached.at(part)});
  }
  return forwards;
}

/// Makes the passes of one stage, one after the other: each begins with what the one before left.
class StagePlanner {
 public:
  /// `shared`, by unit: other stages of the rank use it, too.
  StagePlanner(const StageRecord& record, const std::vector<PlanUnit>& units,
               const PlanChoices& choices, const std::vector<bool>& shared)
      : record_(record), units_(units), choices_(choices), shared_(shared) {
    // Of units that other stages use, too, nobody knows who comes first.
    for (const auto unit : units_of_stage(record, units)) {
      if (units[unit].gathered && !shared[unit]) gathered_.insert(unit);
    }
  }

  MicroBatchPlan next(MicroBatchClass which) {
    MicroBatchPlan plan;
    plan.forward = forward();
    plan.backward = backward(reduces(choices_.reduce, which));
    return plan;
  }

 private:
  bool stays(UnitId unit) const { return choices_.keep.at(unit) == Keep::kUpdate; }

  void gather(PassPlan& pass, UnitId unit) {
    if (!units_.at(unit).gathers || !gathered_.insert(unit).second) return;
    pending_.insert(unit);
    const bool others_may_have = shared_.at(unit) && (stays(unit) || units_[unit].gathered);
    pass.actions.push_back({others_may_have ? Kind::kGatherShared : Kind::kGather, unit});
  }
  void wait(PassPlan& pass, UnitId unit) {
    if (pending_.erase(unit) != 0) pass.actions.push_back({Kind::kWait, unit});
  }
  void release(PassPlan& pass, UnitId unit) {
    if (gathered_.erase(unit) == 0) return;
    pending_.erase(unit);
    pass.actions.push_back({Kind::kRelease, unit});
  }
  template <class Act>
  void for_lenders_and(UnitId unit, const Act& act) const {
    for (const auto lender : units_.at(unit).lenders) act(lender);
    act(unit);
  }

  PassPlan forward() {
    PassPlan pass;
    for (const auto& part : record_.parts) {
      auto& places = pass.places.emplace_back(part.units.size());
      std::vector<int> open(units_.size(), 0);
      for (const auto& [position, enters] : crossings(part)) {
        const auto unit = part.units[position];
        auto& place = places[position];
        if (enters) {
          ++open.at(unit);
          for_lenders_and(unit, [&](UnitId one) { gather(pass, one); });
          for_lenders_and(unit, [&](UnitId one) { wait(pass, one); });
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

  void prefetch(PassPlan& pass, const Trace& part, std::size_t position) {
    const auto& named = units_.at(part.units[position]).forward_prefetch;
    if (named.empty()) {
      const auto end = std::min(part.units.size(), position + 1 + choices_.ahead_in_forward);
      for (auto next = position + 1; next < end; ++next) gather(pass, part.units[next]);
    }
    for (const auto unit : named) gather(pass, unit);
  }

  void end_forward_of(PassPlan& pass, UnitId unit) {
    if (!units_.at(unit).gathers || !gathered_.contains(unit)) return;
    switch (choices_.keep.at(unit)) {
      case Keep::kNot:
        return release(pass, unit);
      case Keep::kBackward:
        pass.actions.push_back({Kind::kKeepToBackward, unit});
        return;
      case Keep::kUpdate:
        // Said once a step.
        if (kept_.insert(unit).second) pass.actions.push_back({Kind::kKeepToUpdate, unit});
        return;
    }
  }

  /// What is kept for less than `until` goes, also where it was gathered for nothing; no gather is
  /// under way from one pass to the next.
  void end_pass(PassPlan& pass, Keep until) {
    for (const auto unit : std::vector<UnitId>(gathered_.begin(), gathered_.end())) {
      if (choices_.keep.at(unit) < until) release(pass, unit);
    }
    for (const auto unit : std::vector<UnitId>(pending_.begin(), pending_.end())) wait(pass, unit);
  }

  std::vector<UnitState> states(bool reduces) const {
    std::vector<UnitState> states;
    for (UnitId id = 0; id < units_.size(); ++id) {
      const auto& unit = units_[id];
      UnitState state;
      state.gathers = unit.gathers && unit.gathers_in_backward;
      state.gathered = gathered_.contains(id);
      state.releases = unit.gathers && !stays(id);
      state.reduces = reduces && unit.reduces;
      state.lenders = unit.lenders;
      state.prefetch = unit.backward_prefetch;
      states.push_back(std::move(state));
    }
    return states;
  }

  PassPlan backward(bool reduces) {
    const auto plan = plan_backward(newest_first(record_.parts, record_.reached), states(reduces),
                                    choices_.ahead_in_backward);
    PassPlan pass;
    for (const auto& part : record_.parts) pass.places.emplace_back(part.units.size());
    std::size_t done = 0;
    const auto take = [&](std::size_t count) {
      while (done < count) add(pass, plan.steps.at(done++));
      return pass.actions.size();
    };
    for (const auto& [part, position, begins] : in_order(plan)) {
      const auto& from = plan.places.at(static_cast<std::uint32_t>(part))[position];
      auto& place = pass.places.at(part)[position];
      if (!begins) {
        place.after = take(from.after);
        continue;
      }
      take(from.needed);
      const bool is_reached = !record_.reached.empty() && record_.reached[part][position];
      if (is_reached) {
        for_lenders_and(record_.parts[part].units[position], [&](UnitId one) { wait(pass, one); });
      }
      place.needed = pass.actions.size();
      take(from.ahead);
      // Gathers ahead are issued first: they go on meanwhile.
      const auto unit = record_.parts[part].units[position];
      if (is_reached && choices_.recompute.at(unit) != RecomputeMode::kNone) {
        pass.actions.push_back({Kind::kRecompute, unit});
      }
      place.ahead = pass.actions.size();
    }
    take(plan.steps.size());
    end_pass(pass, Keep::kUpdate);
    return pass;
  }

  void add(PassPlan& pass, const Step& step) {
    switch (step.kind) {
      case Step::Kind::kGather:
        return gather(pass, step.unit);
      case Step::Kind::kRelease:
        return release(pass, step.unit);
      case Step::Kind::kReduce:
        pass.actions.push_back({Kind::kReduce, step.unit});
        return;
    }
  }

  const StageRecord& record_;
  const std::vector<PlanUnit>& units_;
  const PlanChoices& choices_;
  const std::vector<bool>& shared_;
  std::set<UnitId> gathered_;  // or about to be
  std::set<UnitId> pending_;   // of these
  std::set<UnitId> kept_;      // to the update, as was said
};

}  // namespace

std::vector<PassedPlace> forward_places(const StageRecord& record) {
  std::vector<PassedPlace> places;
  for (std::size_t part = 0; part < record.parts.size(); ++part) {
    for (const auto& [position, enters] : crossings(record.parts[part])) {
      places.push_back({part, position, enters});
    }
  }
  return places;
}

/// As plan_backward() passes them, for units of which nothing is known.
std::vector<PassedPlace> backward_places(const StageRecord& record, std::size_t units) {
  return in_order(plan_backward(newest_first(record.parts, {}), std::vector<UnitState>(units)));
}

std::set<UnitId> units_of_stage(const StageRecord& record, const std::vector<PlanUnit>& units) {
  std::set<UnitId> used;
  for (const auto& part : record.parts) {
    for (const auto id : part.units) {
      const auto& unit = units.at(id);
      used.insert(id);
      for (const auto* others : {&unit.lenders, &unit.forward_prefetch, &unit.backward_prefetch}) {
        used.insert(others->begin(), others->end());
      }
    }
  }
  return used;
}

std::vector<bool> shared_by_stages(const StepRecord& record, const std::vector<PlanUnit>& units) {
  std::vector<int> stages(units.size(), 0);
  for (const auto& stage : record.stages) {
    for (const auto id : units_of_stage(stage, units)) ++stages.at(id);
  }
  std::vector<bool> shared;
  for (const int count : stages) shared.push_back(count > 1);
  return shared;
}

std::vector<bool> may_be_recomputed(const StepRecord& record, const std::vector<PlanUnit>& units) {
  std::vector<bool> may;
  for (const auto& unit : units) may.push_back(unit.recompute_by == RecomputeBy::kPlan);
  for (const auto& stage : record.stages) {
    for (const auto& part : stage.parts) {
      const auto all = crossings(part);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const auto [position, enters] = all[i];
        if (!enters) continue;
        const bool is_alone = i + 1 < all.size() && !all[i + 1].enters;
        if (!is_alone || part.checkpoints[position] != 0) may.at(part.units[position]) = false;
      }
    }
  }
  return may;
}

bool reduces(ReduceAt when, MicroBatchClass which) {
  const bool is_last = which == MicroBatchClass::kOnly || which == MicroBatchClass::kLast;
  return when == ReduceAt::kEveryBackward || (when == ReduceAt::kLastBackward && is_last);
}

MicroBatchClass class_of(std::int64_t index, std::int64_t count) {
  if (count == 1) return MicroBatchClass::kOnly;
  if (index == 0) return MicroBatchClass::kFirst;
  return index + 1 == count ? MicroBatchClass::kLast : MicroBatchClass::kMiddle;
}

PlanChoices eager_choices(const StepRecord& record, const std::vector<bool>& resharded,
                          ReduceAt reduce, PlanOrder order) {
  PlanChoices choices;
  choices.reduce = reduce;
  choices.recompute.resize(resharded.size());
  for (const bool one : resharded) choices.keep.push_back(one ? Keep::kNot : Keep::kUpdate);
  if (order == PlanOrder::kAny) return choices;
  for (const auto& stage : record.stages) {
    if (stage.parts.empty() || stage.parts.back().units.empty()) continue;
    auto& last = choices.keep.at(stage.parts.back().units.back());
    last = std::max(last, Keep::kBackward);
  }
  return choices;
}

StepPlan make_plan(const StepRecord& record, std::vector<PlanUnit> units,
                   const PlanChoices& choices, PlanOrder order) {
  TESSERA_INVARIANT(record.is_complete() && choices.keep.size() == units.size() &&
                        (choices.recompute.empty() || choices.recompute.size() == units.size()),
                    "a plan of what was not recorded");
  TESSERA_CHECK(order == PlanOrder::kOneAfterTheOther ||
                    std::ranges::count(choices.keep, Keep::kBackward) == 0,
                ErrorKind::kUsage,
                "plan of a step: found units kept from forward to backward, expected none where "
                "micro-batches come between; keep them to the update, or not");
  StepPlan plan{.order = order,
                .units = std::move(units),
                .choices = choices,
                .record = record,
                .stages = {}};
  plan.choices.recompute.resize(plan.units.size());
  const auto shared = shared_by_stages(record, plan.units);
  for (const auto& stage : record.stages) {
    auto& of = plan.stages.emplace_back();
    const auto add = [&](StagePlanner& planner, MicroBatchClass which) {
      of.micro_batches.at(static_cast<std::size_t>(which)) = planner.next(which);
    };
    StagePlanner only(stage, plan.units, plan.choices, shared);
    StagePlanner first = only;  // each goes on from here
    add(only, MicroBatchClass::kOnly);
    add(first, MicroBatchClass::kFirst);
    StagePlanner last = first;
    add(first, MicroBatchClass::kMiddle);
    add(last, MicroBatchClass::kLast);
  }
  return plan;
}

namespace {

std::string_view how(RecomputeMode mode) {
  return mode == RecomputeMode::kSelective ? " but for products of weights" : " wholly";
}

/// Of which pass, behind the stage where there are several.
std::string words_of(const StepPlan& plan, std::size_t stage, MicroBatchClass which,
                     const char* pass) {
  return concat(plan.stages.size() > 1 ? concat("stage ", stage, ", ") : std::string(),
                "micro-batch ", to_string(which), ", ", pass, " of ");
}

}  // namespace

std::uint64_t StepPlan::hash() const { return hash_of(*this); }

std::string to_string(const StepPlan& plan) {
  std::string text;
  const auto lines = [&](const std::string& before, const StageRecord& record,
                         const PassPlan& pass) {
    // By action: the last place that does it, in the order of the pass.
    struct Place {
      std::string name;
      const char* when;
    };
    std::multimap<std::size_t, Place> places;  // by how many actions are done then
    for (std::size_t part = 0; part < pass.places.size(); ++part) {
      for (std::size_t i = 0; i < pass.places[part].size(); ++i) {
        const auto& name = plan.units.at(record.parts.at(part).units.at(i)).name;
        const auto& [needed, ahead, after] = pass.places[part][i];
        places.emplace(needed, Place{name, " before it: "});
        places.emplace(ahead, Place{name, " meanwhile: "});
        places.emplace(after, Place{name, " after it: "});
      }
    }
    for (std::size_t i = 0; i < pass.actions.size(); ++i) {
      const auto place = places.upper_bound(i);
      const auto& [kind, unit] = pass.actions[i];
      text += concat(before,
                     place == places.end() ? std::string("all units, at its end: ")
                                           : concat(place->second.name, place->second.when),
                     to_string(kind), " ", plan.units.at(unit).name,
                     kind == Kind::kRecompute ? how(plan.choices.recompute.at(unit)) : "", "\n");
    }
  };
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    for (std::size_t i = 0; i < kMicroBatchClasses; ++i) {
      const auto which = static_cast<MicroBatchClass>(i);
      const auto& [forward, backward] = plan.stages[stage].of(which);
      lines(words_of(plan, stage, which, "forward"), plan.record.stages.at(stage), forward);
      lines(words_of(plan, stage, which, "backward"), plan.record.stages.at(stage), backward);
    }
  }
  return text;
}

}  // namespace tessera::fsdp
