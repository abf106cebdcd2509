// Checks what holds for every plan of a step, by walking through it without running anything.
//
// A plan of make_plan() holds by construction, as tests show. A plan from a file or from a compiler
// pass is checked before the first step that follows it. Pure. Next: step_plan.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

/// Returns the faults of the plan, one line each, naming micro-batch, pass and unit. A plan without
/// faults has these properties: shapes fit the record; actions are done in the order of places;
/// each use comes after the wait for its gather; no unit is gathered twice, released twice, or
/// released while it is used; a unit is kept as long as was chosen, and no other unit is gathered
/// after a pass; while a unit without a prefetch list computes, the chosen number of units ahead is
/// gathered; a backward that reduces reduces each unit once, after everything that may bring it a
/// gradient; exactly the units that are chosen for recomputation are recomputed, where their
/// backward begins; every micro-batch leaves what the next one expects. With `budget_bytes`, the
/// gathered memory of a stage never exceeds it.
std::vector<std::string> faults_of(const StepPlan& plan,
                                   std::optional<std::int64_t> budget_bytes = std::nullopt);

/// Returns the most bytes that one rank has gathered at any time of the step. For several stages,
/// whose order the plan does not know, it is an upper bound.
std::int64_t peak_gathered_bytes(const StepPlan& plan);

}  // namespace tessera::fsdp
