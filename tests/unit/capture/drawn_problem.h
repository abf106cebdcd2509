// Problems of plans for tests of passes, drawn.
#pragma once

#include <cstddef>
#include <vector>

#include "capture/passes.h"
#include "unit/fsdp/drawn_plan.h"

namespace tessera::capture {

/// `units` units of one stage, some of which their user keeps; costs are assumed, but for gathers.
inline PlanProblem drawn_problem(fsdp::Draw& draw, std::size_t units, fsdp::ReduceAt reduce,
                                 fsdp::PlanOrder order = fsdp::PlanOrder::kOneAfterTheOther) {
  PlanProblem problem;
  problem.order = order;
  problem.record = draw.record(1, units);
  problem.units = draw.units(units);
  std::vector<bool> resharded;
  for (std::size_t i = 0; i < units; ++i) resharded.push_back(draw.below(4) != 0);
  problem.eager = eager_choices(problem.record, resharded, reduce, order);
  problem.micro_batches = static_cast<std::int64_t>(1 + draw.below(4));
  problem.profile = default_profile(problem.units);
  for (auto& unit : problem.profile.units) {
    if (draw.coin()) unit.gather_ms = static_cast<double>(draw.below(100)) / 10.0;
  }
  return problem;
}

inline fsdp::StepPlan plan_of(const PlanProblem& problem, const Chosen& chosen) {
  return make_plan(problem.record, problem.units, chosen.choices, problem.order);
}

}  // namespace tessera::capture
