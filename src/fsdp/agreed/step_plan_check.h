// What holds for every plan of a step, checked by going through it without running anything.
//
// A plan that was made here holds by construction, and tests say so; one that comes from a file, or
// from a pass, is asked before the first step that follows it. Pure. Next: step_plan.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/agreed/step_plan.h"

namespace tessera::fsdp {

/// What is wrong with the plan, a line each, naming micro-batch, pass and unit; empty where nothing
/// is: shapes fit the record; actions are done in the order of places; each use comes after the
/// wait for its gather; nothing is gathered twice or given back twice, nor while it is used; what
/// is kept stays as long as was said, and nothing else outlasts a pass; while a unit computes that
/// names nothing itself, as many ahead are gathered as was chosen; where a backward reduces, each
/// unit is once, after all that may still bring it a gradient; what is chosen to be recomputed says so
/// where its backward begins, and nothing else does; every micro-batch leaves what the next one
/// expects. With `budget_bytes`, what a stage has gathered never exceeds it.
std::vector<std::string> faults_of(const StepPlan& plan,
                                   std::optional<std::int64_t> budget_bytes = std::nullopt);

/// The most bytes that one rank has gathered at any time of the step; of several stages, whose
/// order the plan does not know, at most that.
std::int64_t peak_gathered_bytes(const StepPlan& plan);

}  // namespace tessera::fsdp
