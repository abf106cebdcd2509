// From options to the plan of a step: chosen by passes, or given and checked. Pure. Next: passes.h.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "capture/passes.h"
#include "capture/plan_json.h"
#include "capture/plan_profile.h"
#include "fsdp/agreed/step_plan.h"
#include "tessera/compile.h"

namespace tessera::capture {

/// Options that have been read and checked.
struct Planning {
  Form form = Form::k3;
  std::optional<std::int64_t> memory_budget = {};
  std::optional<std::vector<std::string>> passes = {};
  std::optional<PlanFile> given = {};
  std::optional<PlanProfile> profile = {};
  std::optional<ForwardActivations> activations = {};
  bool replays = false;  ///< CompileMode::kReplay
  std::int64_t micro_batches = 1;
  std::string plan_from = {}, profile_from = {};  ///< as messages name them

  /// Returns how units that a plan may recompute are recomputed until there is a plan: wholly,
  /// where memory is bounded or the given plan recomputes.
  RecomputeMode while_recording() const;
};

/// Reads what options name. Errors: as compile().
Planning planning_of(const CompileOptions& options);

/// Returns the problem that passes solve. Errors: kConfig for a profile or activations of other
/// units, and for activations in PlanOrder::kAny.
PlanProblem problem_of(const Planning& planning, const fsdp::StepRecord& record,
                       const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                       fsdp::PlanOrder order);

/// Returns why a run does not follow a sound plan of its units and record, a line each: it is
/// beyond the run's budget, reduces at other times, or chooses otherwise what users have bound
/// (reshard_after_forward, recomputation).
std::vector<std::string> faults_in_run(const PlanProblem& problem, const fsdp::StepPlan& plan);

/// Implements fsdp::Planner. Errors: kConfig as choose(), require_plan_of() and require_sound(),
/// and for a given plan the first of faults_in_run().
fsdp::StepPlan plan_step(const Planning& planning, const fsdp::StepRecord& record,
                         const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                         fsdp::PlanOrder order);

}  // namespace tessera::capture
