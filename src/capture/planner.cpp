#include "capture/planner.h"

#include <algorithm>

#include "base/mapped_file.h"
#include "base/text/byte_size.h"
#include "base/text/printable.h"
#include "capture/recompute_pass.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::StepPlan;
using Faults = std::vector<std::string>;

/// A text that is JSON itself or the name of a JSON file, and the name that messages use for it.
struct Source {
  std::string text, name;
};
Source source_of(const std::string& text_or_file, std::string_view key, std::int64_t most_bytes) {
  const auto first = text_or_file.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text_or_file[first] == '{') {
    return {text_or_file, std::string(key)};
  }
  return {read_text_file(text_or_file, most_bytes), concat(key, ": ", shown(text_or_file))};
}

/// Whether the lists differ only in which units are gathered.
bool differ_in_what_is_gathered_alone(std::vector<fsdp::PlanUnit> one,
                                      const std::vector<fsdp::PlanUnit>& other) {
  if (one.size() != other.size() || one == other) return false;
  for (std::size_t i = 0; i < one.size(); ++i) one[i].gathered = other[i].gathered;
  return one == other;
}

/// Checks a plan against the run's memory.
void add_faults_of_memory(const PlanProblem& problem, const StepPlan& plan, Faults& faults) {
  if (!problem.memory_budget) return;
  const auto bytes = peak_bytes(problem, plan);
  if (bytes <= *problem.memory_budget) return;
  faults.push_back(concat("a plan of ", bytes, " bytes gathered",
                          problem.activations ? " and of activations" : "", ", over the budget of ",
                          exact_size_text(*problem.memory_budget),
                          "; raise compile.memory_budget, or make the plan for it"));
}

const char* reduced_with(fsdp::ReduceAt reduce) {
  switch (reduce) {
    case fsdp::ReduceAt::kEveryBackward:
      return "every micro-batch";
    case fsdp::ReduceAt::kLastBackward:
      return "the last micro-batch";
    case fsdp::ReduceAt::kAsked:
      break;
  }
  return "what StepScope::reduce() asks for";
}

/// Checks a plan against what users have bound, unit by unit.
void add_faults_of_units(const PlanProblem& problem, const StepPlan& plan, Faults& faults) {
  for (fsdp::UnitId unit = 0; unit < plan.units.size(); ++unit) {
    const auto& of = plan.units[unit];
    const auto keep = plan.choices.keep[unit];
    if (of.gathers && problem.eager.keep[unit] == fsdp::Keep::kUpdate &&
        keep != fsdp::Keep::kUpdate) {
      faults.push_back(concat("a plan with unit ", of.name, " kept until: ", word_of(keep),
                              ", expected ", word_of(fsdp::Keep::kUpdate),
                              ", as its reshard_after_forward says, which is off; turn that on, or "
                              "make the plan again with tessera plan"));
    }
    if (of.recompute_by != fsdp::RecomputeBy::kUser) continue;
    const auto found = plan.choices.recompute[unit];
    const auto expected = problem.eager.recompute[unit];
    if (found == expected) continue;
    faults.push_back(concat("a plan with unit ", of.name, " recomputed in mode ", word_of(found),
                            ", expected ", word_of(expected),
                            ", as activation_checkpoint.mode or set_recompute says; leave that "
                            "out, or make the plan again with tessera plan"));
  }
}

void require_none(const Faults& faults, std::string_view name) {
  TESSERA_CHECK(faults.empty(), ErrorKind::kConfig, name, ": found ", faults.front());
}

}  // namespace

RecomputeMode Planning::while_recording() const {
  const bool is_bounded = memory_budget && activations;
  const bool is_given = given && std::ranges::any_of(given->plan.choices.recompute, [](auto mode) {
                          return mode != RecomputeMode::kNone;
                        });
  return is_bounded || is_given ? RecomputeMode::kFull : RecomputeMode::kNone;
}

Planning planning_of(const CompileOptions& options) {
  Planning planning;
  TESSERA_CHECK(options.form >= 1 && options.form <= 3, ErrorKind::kConfig, "compile.form: found ",
                options.form, ", expected 1, 2 or 3");
  TESSERA_CHECK(options.micro_batches >= 1, ErrorKind::kConfig,
                "CompileOptions::micro_batches: found ", options.micro_batches,
                ", expected at least 1");
  TESSERA_CHECK(options.plan.empty() || !options.passes, ErrorKind::kConfig,
                "compile.plan and compile.passes: found both, expected one: passes choose nothing "
                "where a plan is given; leave one out");
  planning.form = static_cast<Form>(options.form);
  planning.memory_budget = options.memory_budget;
  planning.passes = options.passes;
  planning.micro_batches = options.micro_batches;
  planning.replays = options.mode == CompileMode::kReplay;
  planning.activations = options.activations;
  if (planning.passes) check_passes(*planning.passes);
  if (!options.plan.empty()) {
    const auto [text, name] = source_of(options.plan, "compile.plan", kMostPlanBytes);
    planning.plan_from = name;
    planning.given = parse_plan(text, name);
    require_sound(planning.given->plan, std::nullopt, name);
    const auto& plan = planning.given->plan;
    PlanProblem problem;
    problem.record = plan.record;
    problem.memory_budget = planning.memory_budget;
    if (planning.activations) {
      problem.activations = activations_of(*planning.activations, plan.units);
    }
    Faults faults;
    add_faults_of_memory(problem, plan, faults);
    require_none(faults, name);
  }
  if (!options.profile.empty()) {
    const auto [text, name] = source_of(options.profile, "profile", kMostProfileBytes);
    planning.profile_from = name;
    planning.profile = parse_profile(text, name);
  }
  return planning;
}

PlanProblem problem_of(const Planning& planning, const fsdp::StepRecord& record,
                       const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                       fsdp::PlanOrder order) {
  TESSERA_CHECK(
      !planning.activations || order == fsdp::PlanOrder::kOneAfterTheOther, ErrorKind::kConfig,
      "CompileOptions::activations: found them for a step whose micro-batches come in any "
      "order, expected one after the other, since they are of one at a time; give "
      "StepScopeOptions::micro_batches, or leave them out");
  PlanProblem problem{
      .record = record,
      .units = units,
      .eager = eager,
      .order = order,
      .micro_batches = planning.micro_batches,
      .form = planning.form,
      .memory_budget = planning.memory_budget,
      .profile = planning.profile ? profile_of(*planning.profile, units, planning.profile_from)
                                  : default_profile(units),
      .activations = planning.activations
                         ? std::optional(activations_of(*planning.activations, units))
                         : std::nullopt,
      .replays = planning.replays};
  if (!planning.replays || !problem.activations) return problem;
  problem.blocks = blocks_of(problem.profile);
  if (!problem.memory_budget) return problem;
  const auto least = least_bytes(problem, planning.passes);
  if (least <= *problem.memory_budget) return problem;
  // A run begins before it is measured, and its measurement must not end it.
  problem.blocks.clear();
  problem.blocks_left_out = least - least_bytes(problem, planning.passes);
  return problem;
}

Faults faults_in_run(const PlanProblem& problem, const StepPlan& plan) {
  Faults faults;
  if (plan.order != problem.order) {
    faults.push_back(concat("a plan for micro-batches in another order, expected one for ",
                            problem.order == fsdp::PlanOrder::kAny ? "any" : "one after the other",
                            "; make it again with tessera plan"));
  }
  if (plan.choices.reduce != problem.eager.reduce) {
    faults.push_back(
        concat("a plan that reduces with ", reduced_with(plan.choices.reduce), ", expected ",
               reduced_with(problem.eager.reduce),
               ", as sync_every_micro_batch and form 2 say; make it again with tessera "
               "plan"));
  }
  add_faults_of_units(problem, plan, faults);
  add_faults_of_memory(problem, plan, faults);
  return faults;
}

StepPlan plan_step(const Planning& planning, const fsdp::StepRecord& record,
                   const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                   fsdp::PlanOrder order) {
  if (planning.given) {
    auto plan = planning.given->plan;
    // A unit may still be gathered, because the user asked for it or weights did not change.
    if (plan.order == order && differ_in_what_is_gathered_alone(plan.units, units)) {
      plan = make_plan(plan.record, units, plan.choices, order);
    }
    require_plan_of(plan, record, units, planning.plan_from);
    require_none(faults_in_run(problem_of(planning, record, units, eager, order), plan),
                 planning.plan_from);
    return plan;
  }
  const auto problem = problem_of(planning, record, units, eager, order);
  return make_plan(record, units, choose(problem, planning.passes).choices, order);
}

}  // namespace tessera::capture
