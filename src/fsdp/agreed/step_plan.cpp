#include "fsdp/agreed/step_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/fields_hash.h"
#include "base/text/printable.h"
#include "fsdp/agreed/pass_planner.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::vector<PassedPlace> forward_places(const StageRecord& record) {
  std::vector<PassedPlace> places;
  for (std::size_t part = 0; part < record.parts.size(); ++part) {
    for (const auto& [position, enters] : trace_events(record.parts[part])) {
      places.push_back({part, position, enters});
    }
  }
  return places;
}

std::vector<PassedPlace> backward_places(const StageRecord& record) {
  std::vector<PassedPlace> places;
  const auto& parts = record.parts;
  const auto add_checkpoint = [&](std::uint32_t number) {
    std::vector<PassedPlace> inside;
    for (std::size_t part = 0; part < parts.size(); ++part) {
      for (std::size_t i = 0; i < parts[part].checkpoints.size(); ++i) {
        if (parts[part].checkpoints[i] == number) inside.push_back({part, i, true});
      }
    }
    places.insert(places.end(), inside.begin(), inside.end());
    for (auto one = inside.rbegin(); one != inside.rend(); ++one) {
      places.push_back({one->part, one->position, false});
    }
  };
  std::set<std::uint32_t> done;  // numbers of checkpoints
  for (std::size_t part = parts.size(); part-- > 0;) {
    const auto all = trace_events(parts[part]);
    for (auto one = all.rbegin(); one != all.rend(); ++one) {
      const auto checkpoint = parts[part].checkpoints.at(one->position);
      if (checkpoint == 0) {
        places.push_back({part, one->position, !one->enters});
      } else if (done.insert(checkpoint).second) {
        add_checkpoint(checkpoint);
      }
    }
  }
  return places;
}

std::set<UnitId> units_of_stage(const StageRecord& record, const std::vector<PlanUnit>& units) {
  std::set<UnitId> used;
  for (const auto& part : record.parts) {
    for (const auto id : part.units) {
      const auto& unit = units.at(id);
      used.insert(id);
      for (const auto* others : {&unit.owners, &unit.forward_prefetch, &unit.backward_prefetch}) {
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
      const auto all = trace_events(part);
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
    const auto add = [&](PassPlanner& planner, MicroBatchClass which) {
      auto& one = of.micro_batches.at(static_cast<std::size_t>(which));
      one.forward = planner.forward();
      one.backward = planner.backward(reduces(choices.reduce, which));
    };
    PassPlanner only(stage, plan.units, plan.choices, shared);
    PassPlanner first = only;  // both continue from here
    add(only, MicroBatchClass::kOnly);
    add(first, MicroBatchClass::kFirst);
    PassPlanner last = first;
    add(first, MicroBatchClass::kMiddle);
    add(last, MicroBatchClass::kLast);
  }
  return plan;
}

namespace {

std::string_view how(RecomputeMode mode) {
  return mode == RecomputeMode::kSelective ? " but for products of weights" : " wholly";
}

/// Returns the name of the pass, after that of the stage where there are several.
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
    // The last place that runs an action, in the order of the pass.
    struct Place {
      std::string name;
      const char* when;
    };
    std::multimap<std::size_t, Place> places;  // by the number of actions that are done there
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
      text += concat(
          before,
          place == places.end() ? std::string("all units, at its end: ")
                                : concat(place->second.name, place->second.when),
          to_string(kind), " ", plan.units.at(unit).name,
          kind == PlanAction::Kind::kRecompute ? how(plan.choices.recompute.at(unit)) : "", "\n");
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
