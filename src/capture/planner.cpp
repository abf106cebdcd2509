#include "capture/planner.h"

#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "capture/offload_pass.h"
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

}  // namespace

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
  if (planning.passes) check_passes(*planning.passes);
  if (!options.plan.empty()) {
    const auto [text, name] = source_of(options.plan, "compile.plan", kMostPlanBytes);
    planning.plan_from = name;
    planning.given = parse_plan(text, name);
    // Beside optimizer state a budget is looked at once that is known: plan_step().
    const bool is_of_gathers = options.offload_folder.empty();
    require_sound(planning.given->plan, is_of_gathers ? planning.memory_budget : std::nullopt,
                  name);
    TESSERA_CHECK(planning.given->plan.choices.offload.empty() || !options.offload_folder.empty(),
                  ErrorKind::kConfig, name,
                  ": found a plan that offloads optimizer state, expected a folder for that; set "
                  "compile.offload_folder");
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
  return {.record = record,
          .units = units,
          .eager = eager,
          .order = order,
          .micro_batches = planning.micro_batches,
          .form = planning.form,
          .memory_budget = planning.memory_budget,
          .profile = planning.profile ? profile_of(*planning.profile, units, planning.profile_from)
                                      : default_profile(units),
          .state = planning.state};
}

std::optional<std::int64_t> gathered_budget(const Planning& planning,
                                            const fsdp::PlanChoices& choices) {
  if (!planning.memory_budget || !planning.state) return planning.memory_budget;
  return *planning.memory_budget - state_in_memory(*planning.state, choices.offload);
}

fsdp::StepPlan plan_step(const Planning& planning, const fsdp::StepRecord& record,
                         const std::vector<fsdp::PlanUnit>& units, const fsdp::PlanChoices& eager,
                         fsdp::PlanOrder order) {
  if (planning.given) {
    auto plan = planning.given->plan;
    require_sound(plan, gathered_budget(planning, plan.choices), planning.plan_from);
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
    return plan;
  }
  const auto problem = problem_of(planning, record, units, eager, order);
  return make_plan(record, units, choose(problem, planning.passes).choices, order);
}

}  // namespace tessera::capture
