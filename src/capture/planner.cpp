#include "capture/planner.h"

#include <algorithm>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "capture/offload_pass.h"
#include "capture/plan_words.h"
#include "capture/recompute_pass.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

/// A text that is JSON itself, or the name of a file with it; and what messages call it.
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

/// Units that were gathered before the step, or were not: all else is the same.
bool differ_in_what_is_gathered_alone(std::vector<fsdp::PlanUnit> one,
                                      const std::vector<fsdp::PlanUnit>& other) {
  if (one.size() != other.size() || one == other) return false;
  for (std::size_t i = 0; i < one.size(); ++i) one[i].gathered = other[i].gathered;
  return one == other;
}

/// A plan out of a file, in the budget of the run.
void require_within(const Planning& planning, std::string_view name) {
  if (!planning.memory_budget) return;
  const auto& plan = planning.given->plan;
  PlanProblem problem;
  problem.record = plan.record;
  problem.units = plan.units;
  if (planning.activations) {
    problem.activations = activations_of(*planning.activations, plan.units);
  }
  problem.state = planning.state;
  const auto bytes = peak_bytes(problem, plan);
  TESSERA_CHECK(bytes <= *planning.memory_budget, ErrorKind::kConfig, name, ": found a plan of ",
                bytes, " bytes gathered", planning.activations ? " and of activations" : "",
                planning.state ? " and of optimizer state" : "", ", over the budget of ",
                *planning.memory_budget, "; raise compile.memory_budget, or make the plan for it");
}

void require_modes_of_users(const fsdp::StepPlan& plan, const fsdp::PlanChoices& eager,
                            std::string_view name) {
  for (fsdp::UnitId unit = 0; unit < plan.units.size(); ++unit) {
    if (plan.units[unit].recompute_by != fsdp::RecomputeBy::kUser) continue;
    const auto found = plan.choices.recompute[unit];
    const auto expected = eager.recompute[unit];
    TESSERA_CHECK(found == expected, ErrorKind::kConfig, name, ": found a plan with unit ",
                  plan.units[unit].name, " recomputed in mode ", word_of(kRecomputeWords, found),
                  ", expected ", word_of(kRecomputeWords, expected),
                  ", as activation_checkpoint.mode or set_recompute says; leave that out, or make "
                  "the plan anew with tessera plan");
  }
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
    TESSERA_CHECK(planning.given->plan.choices.offload.empty() || !options.offload_folder.empty(),
                  ErrorKind::kConfig, name,
                  ": found a plan that offloads optimizer state, expected a folder for that; set "
                  "compile.offload_folder");
    // Beside optimizer state a budget is looked at once that is known: plan_step().
    if (options.offload_folder.empty()) require_within(planning, name);
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
      .replays = planning.replays,
      .state = planning.state};
  if (!planning.replays || !problem.activations) return problem;
  problem.blocks = blocks_of(problem.profile);
  if (!problem.memory_budget) return problem;
  const auto least = least_bytes(problem, planning.passes);
  if (least <= *problem.memory_budget) return problem;
  // A run begins before it is measured: what it measures does not end it.
  problem.blocks.clear();
  problem.blocks_left_out = least - least_bytes(problem, planning.passes);
  return problem;
}

fsdp::StepPlan plan_step(const Planning& planning, const fsdp::StepRecord& record,
                         const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                         fsdp::PlanOrder order) {
  if (planning.given) {
    auto plan = planning.given->plan;
    if (planning.state) require_within(planning, planning.plan_from);
    // A unit may still be gathered, since the user asked for it, or weights did not change.
    if (plan.order == order && differ_in_what_is_gathered_alone(plan.units, units)) {
      plan = make_plan(plan.record, units, plan.choices, order);
    }
    require_plan_of(plan, record, units, planning.plan_from);
    TESSERA_CHECK(plan.order == order, ErrorKind::kConfig, planning.plan_from,
                  ": found a plan for micro-batches in another order, expected one for ",
                  order == fsdp::PlanOrder::kAny ? "any" : "one after the other",
                  "; make it anew with tessera plan");
    const auto words = [](fsdp::ReduceAt reduce) {
      return reduce == fsdp::ReduceAt::kEveryBackward ? "every micro-batch"
                                                      : "the last micro-batch";
    };
    TESSERA_CHECK(plan.choices.reduce == eager.reduce, ErrorKind::kConfig, planning.plan_from,
                  ": found a plan that reduces with ", words(plan.choices.reduce), ", expected ",
                  words(eager.reduce),
                  ", as sync_every_micro_batch and form 2 say; make it anew with tessera plan");
    require_modes_of_users(plan, eager, planning.plan_from);
    return plan;
  }
  const auto problem = problem_of(planning, record, units, eager, order);
  return make_plan(record, units, choose(problem, planning.passes).choices, order);
}

}  // namespace tessera::capture
