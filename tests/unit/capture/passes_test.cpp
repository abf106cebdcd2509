// What passes choose: what saves most for its bytes, within the budget, and nothing that a user has
// bound.
#include "capture/passes.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <regex>

#include "capture/plan_text.h"
#include "capture/recompute_pass.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"
#include "unit/capture/drawn_problem.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::passes_test {
namespace {

using fsdp::Draw;
using fsdp::flat;
using fsdp::Keep;
using fsdp::PlanOrder;
using fsdp::ReduceAt;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Names = std::vector<std::string>;

/// The root of 10 bytes, which stays, around units of these.
PlanProblem problem_of(const std::vector<std::int64_t>& bytes, std::int64_t micro_batches = 1) {
  PlanProblem problem;
  std::vector<fsdp::UnitId> all{0};
  std::vector<bool> resharded{false};
  problem.units = fsdp::units_of(1 + bytes.size());
  problem.units[0].bytes = 10;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    problem.units[i + 1].bytes = bytes[i];
    all.push_back(static_cast<fsdp::UnitId>(i + 1));
    resharded.push_back(true);
  }
  problem.record = fsdp::record_of({flat(all)});
  problem.eager = eager_choices(problem.record, resharded, ReduceAt::kLastBackward, problem.order);
  problem.micro_batches = micro_batches;
  problem.profile = default_profile(problem.units);
  return problem;
}

std::string refused(const auto& choose) {
  try {
    choose();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
    return error.what();
  }
  return "";
}

// The large one does not fit; the ones after it in the order of what they save are still looked at.
TEST(KeepPass, AUnitThatDoesNotFitIsSkippedAndNotTheEnd) {
  auto problem = problem_of({100, 20, 30, 20}, 4);
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.1;
  problem.profile.units[1].gather_ms = 100.0;  // most by byte
  problem.memory_budget = 150;
  const auto chosen = choose(problem, Names{"keep"});
  EXPECT_EQ(chosen.choices.keep[1], Keep::kNot);
  EXPECT_THAT(chosen.keep_reasons[1], AllOf(HasSubstr("would save"), HasSubstr("do not fit")));
  EXPECT_EQ(chosen.choices.keep[2], Keep::kUpdate);
  EXPECT_THAT(chosen.keep_reasons[2], HasSubstr("a micro-batch for 20 B"));
  EXPECT_LE(fsdp::peak_gathered_bytes(plan_of(problem, chosen)), 150);
}

// Naive: neighbours are left out together, and the gather of the second one hides behind nothing.
TEST(KeepPass, OfUnitsAlikeEverySecondOneIsKept) {
  auto problem = problem_of({20, 20, 20, 20, 20, 20}, 4);
  problem.memory_budget = 10 + 3 * 20 + 20;
  const auto chosen = choose(problem, Names{"keep"});
  EXPECT_THAT(chosen.choices.keep,
              ElementsAre(Keep::kUpdate, Keep::kUpdate, Keep::kNot, Keep::kUpdate, Keep::kNot,
                          Keep::kUpdate, Keep::kBackward));
}

// What passes count on: how long one unit stays changes nothing of how often another is gathered.
TEST(KeepPass, GathersOfAUnitFollowFromItsOwnChoice) {
  const auto counts = [](const fsdp::StepPlan& plan, fsdp::UnitId unit) {
    std::vector<std::ptrdiff_t> found;
    for (const auto& one : plan.stages[0].micro_batches) {
      for (const auto* pass : {&one.forward, &one.backward}) {
        found.push_back(std::ranges::count_if(pass->actions, [&](const auto& action) {
          return action.unit == unit && action.kind == fsdp::PlanAction::Kind::kGather;
        }));
      }
    }
    return found;
  };
  for (unsigned seed = 0; seed < 300; ++seed) {
    Draw draw(seed);
    const auto count = 2 + draw.below(4);
    const auto record = draw.record(1, count);
    const auto units = draw.units(count);
    fsdp::PlanChoices choices{std::vector<Keep>(count), ReduceAt::kLastBackward, 1, 1};
    for (auto& keep : choices.keep) keep = static_cast<Keep>(draw.below(3));
    const auto unit = static_cast<fsdp::UnitId>(draw.below(count));
    auto others = choices;
    for (std::size_t i = 0; i < count; ++i) {
      if (i != unit) others.keep[i] = static_cast<Keep>(draw.below(3));
    }
    const auto order = PlanOrder::kOneAfterTheOther;
    ASSERT_EQ(counts(make_plan(record, units, choices, order), unit),
              counts(make_plan(record, units, others, order), unit))
        << seed;
  }
}

// Of one micro-batch no gather is saved after the backward, so nothing is kept for longer.
TEST(KeepPass, NothingIsKeptLongerThanItSaves) {
  auto problem = problem_of({20, 20, 20});
  problem.memory_budget = 1000;
  const auto chosen = choose(problem, Names{"keep"});
  EXPECT_THAT(chosen.choices.keep,
              ElementsAre(Keep::kUpdate, Keep::kBackward, Keep::kBackward, Keep::kBackward));
  problem.micro_batches = 2;
  EXPECT_THAT(choose(problem, Names{"keep"}).choices.keep, ::testing::Each(Keep::kUpdate));
}

TEST(PrefetchPass, GoesAsFarAheadAsItPays) {
  auto problem = problem_of({20, 20, 20, 20, 20});
  // A gather takes as long as two units compute.
  for (auto& unit : problem.profile.units) unit = {unit.name, 1.0, 1.0, 2.0, 0.0};
  for (auto& unit : problem.profile.units) unit.gather_ms = unit.name == "layer 3" ? 3.0 : 0.1;
  const auto far = choose(problem, Names{"prefetch"});
  EXPECT_GE(far.choices.ahead_in_forward, 2U);
  EXPECT_THAT(far.ahead_reason, HasSubstr("the best of the 25 choices that fit"));
  // What hides behind one unit is not gathered before that.
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.5;
  EXPECT_EQ(choose(problem, Names{"prefetch"}).choices.ahead_in_forward, 1U);
  // One of many units that is waited for is less than what steps wander by.
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.1;
  problem.profile.units.back().gather_ms = 1.05;
  const auto kept = choose(problem, Names{"prefetch"});
  EXPECT_EQ(kept.choices, problem.eager);
  EXPECT_THAT(kept.ahead_reason,
              HasSubstr("of the 25 choices that fit none is more than 2 % better"));
  // Nothing fits beside what is read.
  problem.memory_budget = least_bytes(problem);
  const auto none = choose(problem, Names{"prefetch"});
  EXPECT_EQ(none.choices.ahead_in_forward, 0U);
  EXPECT_EQ(none.choices.ahead_in_backward, 0U);
}

TEST(Passes, BudgetBelowTheLeastGivesTheLeastInBytes) {
  auto problem = problem_of({20, 30, 20});
  EXPECT_EQ(least_bytes(problem), 40);
  problem.memory_budget = 39;
  EXPECT_THAT(refused([&] { choose(problem); }),
              AllOf(HasSubstr("compile.memory_budget: found 39"), HasSubstr("expected at least 40"),
                    HasSubstr("form 3; raise it")));
  problem.memory_budget = 40;
  EXPECT_LE(fsdp::peak_gathered_bytes(plan_of(problem, choose(problem))), 40);
  problem.form = Form::k1;
  EXPECT_THAT(refused([&] { choose(problem); }),
              AllOf(HasSubstr("at least 80"), HasSubstr("compile.form = 3")));
}

TEST(Passes, FormsAreZerosStages) {
  auto problem = problem_of({20, 30}, 3);
  problem.form = Form::k1;
  const auto one = choose(problem);
  EXPECT_THAT(one.choices.keep, ::testing::Each(Keep::kUpdate));
  EXPECT_EQ(one.choices.reduce, ReduceAt::kLastBackward);
  EXPECT_EQ(one.keep_reasons[1], "form 1");
  problem.form = Form::k2;
  EXPECT_EQ(choose(problem).choices.reduce, ReduceAt::kEveryBackward);
}

TEST(Passes, WhatAUserBoundStays) {
  auto problem = problem_of({20, 30, 20}, 4);
  problem.eager.keep[1] = Keep::kUpdate;
  problem.units[2].forward_prefetch = {3};
  problem.memory_budget = least_bytes(problem);
  const auto chosen = choose(problem);
  EXPECT_EQ(chosen.choices.keep[1], Keep::kUpdate);
  EXPECT_EQ(chosen.keep_reasons[1], "its reshard_after_forward is off");
  const auto plan = plan_of(problem, chosen);
  const auto& forward = plan.stages[0].of(fsdp::MicroBatchClass::kFirst).forward;
  const auto& place = forward.places[0][2];
  EXPECT_EQ(forward.actions[place.needed].unit, 3U) << "what layer 2 names is gathered beside it";
}

TEST(Passes, UnknownOnesAndUnmetRequirementsAreNamed) {
  auto problem = problem_of({20, 30}, 2);
  const auto with = [&](const Names& names) { return refused([&] { choose(problem, names); }); };
  EXPECT_THAT(with({"keap"}), HasSubstr("found 'keap', expected recompute, keep or prefetch"));
  EXPECT_THAT(with({"offload"}), HasSubstr("keep or prefetch; optimizer state is in memory"));
  EXPECT_THAT(with({"keep"}), HasSubstr("found keep without compile.memory_budget"));
  EXPECT_THAT(with({"prefetch", "prefetch"}), HasSubstr("twice"));
  problem.memory_budget = 1000;
  EXPECT_THAT(with({"prefetch", "keep"}), HasSubstr("keep behind a pass that has decided how far"));
  problem.form = Form::k1;
  EXPECT_THAT(with({"keep"}), HasSubstr("keep without units that are gathered more than once"));
  // Where nobody asked for it, it is left out, and says so.
  EXPECT_THAT(choose(problem).notes,
              Contains("pass keep is left out, since no unit is gathered more than once a step"));
}

// Whatever units, traces, budgets and costs: a plan that holds, within the budget, the same every
// time; with more memory never fewer bytes' worth of gathers saved than the least.
/// "3 ms", "1.5 s": which are unknown where nothing was measured.
bool speaks_of_seconds(const Chosen& chosen) {
  std::string all = chosen.ahead_reason;
  for (const auto* texts : {&chosen.keep_reasons, &chosen.recompute_reasons, &chosen.notes}) {
    for (const auto& text : *texts) all += "\n" + text;
  }
  return std::regex_search(all, std::regex(R"([0-9] m?s\b)"));
}

// Naive: a default cost of bytes, shown as times and used in reasons. The choices are the same
// either way.
TEST(Passes, WithoutAProfileNoReasonHasSeconds) {
  int with_times = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    Draw draw(seed);
    const auto count = 2 + draw.below(4);
    auto problem = drawn_problem(draw, count, ReduceAt::kLastBackward);
    for (auto& unit : problem.units) unit.recompute_by = fsdp::RecomputeBy::kPlan;
    ForwardActivations given;
    for (const auto& unit : problem.units) {
      given.units.push_back({.unit = unit.name,
                             .none = 9,
                             .selective = 6,
                             .full = 2,
                             .selective_again = 9,
                             .full_again = 9});
    }
    problem.activations = activations_of(given, problem.units);
    problem.memory_budget = least_bytes(problem) + static_cast<std::int64_t>(draw.below(40));
    const auto chosen = choose(problem);
    EXPECT_FALSE(speaks_of_seconds(chosen)) << seed;
    problem.profile.is_assumed = false;
    const auto measured = choose(problem);
    EXPECT_EQ(measured.choices, chosen.choices) << seed;
    with_times += speaks_of_seconds(measured) ? 1 : 0;
  }
  EXPECT_GT(with_times, 30) << "a profile's are said";
}

TEST(Passes, DrawnProblemsGiveValidPlansWithinTheirBudgets) {
  int refusals = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    Draw draw(seed);
    const auto count = 1 + draw.below(5);
    const auto order = draw.coin() ? PlanOrder::kAny : PlanOrder::kOneAfterTheOther;
    auto problem = drawn_problem(draw, count, static_cast<ReduceAt>(draw.below(3)), order);
    problem.form = std::array{Form::k1, Form::k2, Form::k3}.at(draw.below(3));
    if (draw.coin()) problem.memory_budget = static_cast<std::int64_t>(draw.below(80));
    try {
      const auto chosen = choose(problem);
      ASSERT_EQ(choose(problem), chosen) << seed;
      const auto plan = plan_of(problem, chosen);
      ASSERT_THAT(fsdp::faults_of(plan, problem.memory_budget), IsEmpty()) << seed;
      for (std::size_t i = 0; i < count; ++i) {
        if (problem.eager.keep[i] == Keep::kUpdate) {
          ASSERT_EQ(chosen.choices.keep[i], Keep::kUpdate);
        }
      }
      const auto step = simulate(plan, problem.profile, problem.micro_batches);
      ASSERT_LE(step.peak_bytes, fsdp::peak_gathered_bytes(plan)) << seed;
      UnitCounts all;
      for (const auto& [gathers, reductions] : counts_of(plan, problem.micro_batches)) {
        all.gathers += gathers;
        all.reductions += reductions;
      }
      ASSERT_EQ(all, (UnitCounts{step.gathers, step.reductions})) << seed;
      ASSERT_THAT(to_text(plan, chosen, problem.micro_batches), Not(HasSubstr("()"))) << seed;
    } catch (const Error& error) {
      ++refusals;
      ASSERT_THAT(error.what(), HasSubstr("compile.memory_budget")) << seed;
      ASSERT_LT(*problem.memory_budget, least_bytes(problem)) << seed;
    }
  }
  EXPECT_GT(refusals, 5);
  EXPECT_LT(refusals, 200);
}

TEST(PlanText, EveryActionHasItsReason) {
  auto problem = problem_of({20, 30, 20}, 2);
  problem.memory_budget = 85;
  const auto chosen = choose(problem, Names{"keep"});
  const auto text = to_text(plan_of(problem, chosen), chosen, 2);
  EXPECT_THAT(text, AllOf(HasSubstr("micro-batch first, forward:\n"),
                          HasSubstr("  before the root: gather the root (needed by the root)\n"),
                          HasSubstr("keep to update the root (its reshard_after_forward is off)"),
                          HasSubstr("reduce layer 1 (nothing more brings it a gradient)"),
                          HasSubstr("a micro-batch for 20 B)"), HasSubstr("micro-batch last")));
  EXPECT_THAT(text, Not(HasSubstr("micro-batch middle")));
}

// Naive: 32 lines that say the same of 32 layers.
TEST(PlanText, LayersThatAreAlikeHaveOneLine) {
  auto problem = problem_of({20, 20, 20, 20, 20});
  for (std::size_t i = 1; i < problem.units.size(); ++i) {
    problem.units[i].name = concat("model.layers.", i - 1);
  }
  Chosen chosen = choose(problem, Names{});
  chosen.keep_reasons[3] = "of its own";
  EXPECT_THAT(choices_text(plan_of(problem, chosen), chosen),
              AllOf(HasSubstr("\n  model.layers.{0-1,3} x 3 (20 B): given back after forward\n"),
                    HasSubstr("\n  model.layers.2 (20 B): given back after forward: of its own\n"),
                    HasSubstr("\n  model.layers.4 (20 B): kept to its backward")));
}

}  // namespace
}  // namespace tessera::capture::passes_test
