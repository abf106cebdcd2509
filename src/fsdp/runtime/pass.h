// Pass: a forward or backward under way: its plan, and how much of the plan is done. The runtime or
// the open step owns it; Runtime::advance() runs the actions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

struct Pass {
  std::shared_ptr<const PassPlan> plan;
  std::uint32_t number = 0;  ///< of the forward or micro-batch, for labels of gathers
  std::size_t done = 0;      ///< number of actions that were run
  // For a pair ([Note: pairs] in open_step.h):
  const Pass* paired = nullptr;  ///< the other pass
  std::vector<bool> holds;       ///< by unit: gathered for this pass, and not released

  bool has(UnitId unit) const { return unit < holds.size() && holds[unit]; }
  void hold(UnitId unit, bool value) {
    if (unit < holds.size()) holds[unit] = value;
  }
  PlanPlace place(std::size_t part, std::size_t position) const {
    return plan->places.at(part).at(position);
  }
};

}  // namespace tessera::fsdp
