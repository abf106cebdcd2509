// Plans of steps for tests: of a few units, and drawn.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "fsdp/agreed/step_plan.h"
#include "tessera/error.h"

namespace tessera::fsdp {

/// The root and layers.
inline std::vector<PlanUnit> units_of(std::size_t count) {
  std::vector<PlanUnit> units(count);
  for (std::size_t i = 0; i < count; ++i) {
    units[i].name = i == 0 ? "the root" : concat("layer ", i);
    units[i].bytes = 10 + static_cast<std::int64_t>(i);
    units[i].gathers = units[i].reduces = true;
  }
  return units;
}

/// One stage, whose backward needs all of it.
inline StepRecord record_of(std::vector<Trace> parts) {
  StageRecord stage;
  for (auto& part : parts) stage.reached.emplace_back(part.units.size(), true);
  stage.parts = std::move(parts);
  return {{std::move(stage)}, false};
}

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  std::size_t below(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(engine_);
  }
  bool coin() { return below(2) == 0; }

  /// Calls one inside another, some in checkpoints, of any unit.
  Trace trace(std::size_t units) {
    Trace trace;
    std::vector<std::size_t> open;
    const auto calls = 1 + below(8);
    std::uint32_t checkpoint = 0;
    const auto leave = [&] {
      trace.exits.push_back(open.back());
      open.pop_back();
    };
    const auto enter = [&](std::size_t unit) {
      open.push_back(trace.units.size());
      trace.units.push_back(static_cast<UnitId>(unit));
      trace.checkpoints.push_back(checkpoint);
    };
    enter(0);
    for (std::size_t i = 1; i < calls; ++i) {
      while (open.size() > 1 && coin()) leave();
      enter(below(units));
    }
    while (!open.empty()) leave();
    return trace;
  }

  StepRecord record(std::size_t stages, std::size_t units) {
    StepRecord record;
    for (std::size_t i = 0; i < stages; ++i) {
      auto& stage = record.stages.emplace_back();
      for (std::size_t part = 0; part < 1 + below(2); ++part) {
        stage.parts.push_back(trace(units));
        auto& reached = stage.reached.emplace_back();
        for (std::size_t at = 0; at < stage.parts.back().units.size(); ++at) {
          reached.push_back(below(4) != 0);
        }
      }
    }
    return record;
  }

  std::vector<PlanUnit> units(std::size_t count) {
    auto units = units_of(count);
    for (auto& unit : units) {
      unit.gathers = below(6) != 0;
      unit.gathers_in_backward = below(6) != 0;
      unit.gathered = unit.gathers && below(5) == 0;
      unit.reduces = coin();
      unit.recompute_by = static_cast<RecomputeBy>(below(3));
      const auto some = [&](std::vector<UnitId>& list) {
        if (below(4) == 0) list.push_back(static_cast<UnitId>(below(count)));
      };
      some(unit.forward_prefetch);
      some(unit.backward_prefetch);
    }
    for (UnitId id = 1; id < count; ++id) {
      if (below(5) == 0) units[id].owners = {0};
    }
    return units;
  }

  /// Draws the modes that a plan may choose, and those that users may have set.
  std::vector<RecomputeMode> recompute(const StepRecord& record,
                                       const std::vector<PlanUnit>& units) {
    const auto may = may_be_recomputed(record, units);
    std::vector<RecomputeMode> modes(units.size());
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (!may[i] && units[i].recompute_by != RecomputeBy::kUser) continue;
      modes[i] = static_cast<RecomputeMode>(below(3));
    }
    return modes;
  }

  StepPlan plan() {
    const auto count = 1 + below(5);
    const auto order = coin() ? PlanOrder::kAny : PlanOrder::kOneAfterTheOther;
    PlanChoices choices;
    const auto pick = std::array{Keep::kNot, Keep::kUpdate, Keep::kBackward};
    for (std::size_t i = 0; i < count; ++i) {
      choices.keep.push_back(pick.at(below(order == PlanOrder::kAny ? 2 : 3)));
    }
    choices.reduce = static_cast<ReduceAt>(below(3));
    choices.ahead_in_forward = below(4);
    choices.ahead_in_backward = below(4);
    const auto stages = order == PlanOrder::kAny ? 1 + below(3) : 1;
    const auto of = record(stages, count);
    const auto all = units(count);
    choices.recompute = recompute(of, all);
    return make_plan(of, all, choices, order);
  }

 private:
  std::mt19937 engine_;
};

}  // namespace tessera::fsdp
