// Pass: a forward or backward under way, by its plan and how much of it is done.
//
// One mechanism with three moments: a step that follows a record has its plans when it begins, a
// step that records has one for each backward when all ranks have agreed on what it goes through,
// and so has a backward outside of a step scope. Only a forward that nothing is known of has none.
// Runtime::advance() does the actions. Next: ../agreed/pass_planner.h (which writes plans).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

struct Pass {
  std::shared_ptr<const PassPlan> plan;
  std::uint32_t number = 0;  ///< of the forward or micro-batch, for labels of gathers
  std::size_t done = 0;      ///< of its actions

  PlanPlace place(std::size_t part, std::size_t position) const {
    return plan->places.at(part).at(position);
  }
};

}  // namespace tessera::fsdp
