// Passes choose what saves most for its bytes, within the budget, and nothing that a user has
// bound.

#include "capture/passes.h"

#include <numeric>
#include <regex>

#include "capture/plan_profile.h"
#include "capture/plan_text.h"
#include "capture/planner.h"
#include "capture/recompute_pass.h"
#include "capture/region_blocks.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "support/test.h"
#include "unit/capture/drawn_problem.h"
#include "unit/fsdp/drawn_plan.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::passes_test {
namespace {

using fsdp::Draw;
using fsdp::flat;
using fsdp::Keep;
using fsdp::PlanOrder;
using fsdp::ReduceAt;
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
  return refusal_of(ErrorKind::kConfig, [&] { choose(); });
}

// The large one does not fit; the ones after it in the order of what they save are still looked at.
TEST(KeepPass, AUnitThatDoesNotFitIsSkippedAndNotTheEnd) {
  auto problem = problem_of({100, 20, 30, 20}, 4);
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.1;
  problem.profile.units[1].gather_ms = 100.0;  // most by byte
  problem.memory_budget = 150;
  const auto chosen = choose(problem, Names{"keep"});
  EXPECT_EQ(chosen.choices.keep[1], Keep::kNot);
  EXPECT_THAT(chosen.keep_reasons[1], Says("would save", "do not fit"));
  EXPECT_EQ(chosen.choices.keep[2], Keep::kUpdate);
  EXPECT_THAT(chosen.keep_reasons[2], Says("a micro-batch for 20 B"));
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

// Passes rely on this: how long one unit stays does not change how often another is gathered.
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

// With one micro-batch no gather is saved after the backward, so nothing is kept for longer.
TEST(KeepPass, NothingIsKeptLongerThanItSaves) {
  auto problem = problem_of({20, 20, 20});
  problem.memory_budget = 1000;
  const auto chosen = choose(problem, Names{"keep"});
  EXPECT_THAT(chosen.choices.keep,
              ElementsAre(Keep::kUpdate, Keep::kBackward, Keep::kBackward, Keep::kBackward));
  problem.micro_batches = 2;
  EXPECT_THAT(choose(problem, Names{"keep"}).choices.keep, Each(Keep::kUpdate));
}

TEST(PrefetchPass, GoesAsFarAheadAsItPays) {
  auto problem = problem_of({20, 20, 20, 20, 20});
  // A gather takes as long as two units compute.
  for (auto& unit : problem.profile.units) unit = {unit.name, 1.0, 1.0, 2.0, 0.0};
  for (auto& unit : problem.profile.units) unit.gather_ms = unit.name == "layer 3" ? 3.0 : 0.1;
  const auto far = choose(problem, Names{"prefetch"});
  EXPECT_GE(far.choices.ahead_in_forward, 2U);
  EXPECT_THAT(far.ahead_reason, Says("the best of the 25 choices that fit"));
  // A gather that hides behind one unit is not issued before that.
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.5;
  EXPECT_EQ(choose(problem, Names{"prefetch"}).choices.ahead_in_forward, 1U);
  // A wait for one of many units is less than the noise of steps.
  for (auto& unit : problem.profile.units) unit.gather_ms = 0.1;
  problem.profile.units.back().gather_ms = 1.05;
  const auto kept = choose(problem, Names{"prefetch"});
  EXPECT_EQ(kept.choices, problem.eager);
  EXPECT_THAT(kept.ahead_reason, Says("of the 25 choices that fit none is more than 2 % better"));
  // Nothing fits in addition to what is read.
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
              Says("compile.memory_budget: found 39", "expected at least 40", "form 3; raise it"));
  problem.memory_budget = 40;
  EXPECT_LE(fsdp::peak_gathered_bytes(plan_of(problem, choose(problem))), 40);
  problem.form = Form::k1;
  EXPECT_THAT(refused([&] { choose(problem); }), Says("at least 80", "compile.form = 3"));
}

TEST(Passes, FormsAreZerosStages) {
  auto problem = problem_of({20, 30}, 3);
  problem.form = Form::k1;
  const auto one = choose(problem);
  EXPECT_THAT(one.choices.keep, Each(Keep::kUpdate));
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
  EXPECT_EQ(forward.actions[place.needed].unit, 3U)
      << "the unit that layer 2 names is gathered with it";
}

TEST(Passes, UnknownOnesAndUnmetRequirementsAreNamed) {
  auto problem = problem_of({20, 30}, 2);
  const auto with = [&](const Names& names) { return refused([&] { choose(problem, names); }); };
  EXPECT_THAT(with({"keap"}), Says("found 'keap', expected recompute, keep or prefetch"));
  EXPECT_THAT(with({"offload"}), Says("keep or prefetch; optimizer state is in memory"));
  EXPECT_THAT(with({"keep"}), Says("found keep without compile.memory_budget"));
  EXPECT_THAT(with({"prefetch", "prefetch"}), Says("twice"));
  problem.memory_budget = 1000;
  EXPECT_THAT(with({"prefetch", "keep"}), Says("keep behind a pass that has decided how far"));
  problem.form = Form::k1;
  EXPECT_THAT(with({"keep"}), Says("keep without units that are gathered more than once"));
  // Where it is not asked for, it is left out, and says so.
  EXPECT_THAT(choose(problem).notes,
              Contains("pass keep is left out, since no unit is gathered more than once a step"));
}

// For any units, traces, budgets and costs: a plan that holds, within the budget, the same every
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
      ASSERT_THAT(to_text(plan, chosen, problem.micro_batches), Not(Says("()"))) << seed;
    } catch (const Error& error) {
      ++refusals;
      ASSERT_THAT(error.what(), Says("compile.memory_budget")) << seed;
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
  EXPECT_THAT(text, Says("micro-batch first, forward:\n",
                         "  before the root: gather the root (needed by the root)\n",
                         "keep to update the root (its reshard_after_forward is off)",
                         "reduce layer 1 (nothing more brings it a gradient)",
                         "a micro-batch for 20 B)", "micro-batch last"));
  EXPECT_THAT(text, Not(Says("micro-batch middle")));
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
              Says("\n  model.layers.{0-1,3} x 3 (20 B): resharded after forward\n",
                   "\n  model.layers.2 (20 B): resharded after forward: of its own\n",
                   "\n  model.layers.4 (20 B): kept to its backward"));
}

// Blocks of replayed regions, by hand: what they take at most, what a profile tells of other modes,
// and what budgets make of them.
using enum RecomputeMode;

/// A root without regions around three layers.
PlanProfile profile_of(RecomputeMode mode) {
  PlanProfile profile = default_profile(fsdp::units_of(4));
  RegionBlocks found;
  found.units["layer 1"] = {.entries = 100, .running = 150};
  found.units["layer 2"] = {.entries = 100, .running = 120};
  found.units["layer 3"] = {.entries = 40, .running = 60};
  found.units["another"] = {.entries = 1, .running = 1};
  add_blocks(profile, found, {kNone, mode, mode, mode});
  return profile;
}

fsdp::StepRecord record() { return fsdp::record_of({fsdp::flat({0, 1, 2, 3})}); }

TEST(RegionBlocks, TheMostIsInTheLastLayersOrWhereALargeOneRuns) {
  const auto profile = profile_of(kNone);
  EXPECT_FALSE(profile.units[0].blocks);
  EXPECT_THAT(blocks_of(profile), ElementsAre(UnitBlocks{}, UnitBlocks{100, 150},
                                              UnitBlocks{100, 120}, UnitBlocks{40, 60}));
  EXPECT_EQ(most_blocks(profile, record(), {kNone, kNone, kNone, kNone}), 100 + 100 + 60);
  EXPECT_EQ(most_blocks(profile, record(), {kNone, kNone, kFull, kFull}), 100 + 120);
  EXPECT_EQ(most_blocks(profile, record(), {kNone, kFull, kFull, kFull}), 150);
}

// Naive: products that a checkpoint keeps, which are none of the region's then.
TEST(RegionBlocks, OfAModeThatNoOneMeasuredNothingIsKnown) {
  const std::vector<RecomputeMode> selective{kNone, kSelective, kSelective, kSelective};
  EXPECT_FALSE(most_blocks(profile_of(kNone), record(), selective));
  EXPECT_FALSE(most_blocks(profile_of(kSelective), record(), {kNone, kNone, kNone, kNone}));
  EXPECT_EQ(most_blocks(profile_of(kSelective), record(), selective), 150);
  EXPECT_EQ(most_blocks(profile_of(kFull), record(), {kNone, kNone, kNone, kNone}), 260);
  EXPECT_FALSE(most_blocks(default_profile(fsdp::units_of(4)), record(), selective));
}

TEST(RegionBlocks, OfSeveralRanksTheMostCountsForAnySlowest) {
  auto one = profile_of(kNone), other = profile_of(kNone);
  one.units[1].forward_ms = 100.0;
  other.units[1].blocks->bytes = {.entries = 200, .running = 210};
  one.units[2].blocks.reset();
  const auto slowest = slowest_of({one, other});
  EXPECT_EQ(slowest.units[1].forward_ms, 100.0);
  EXPECT_EQ(slowest.units[1].blocks->bytes, (UnitBlocks{.entries = 200, .running = 210}));
  EXPECT_EQ(slowest.units[2].blocks, other.units[2].blocks);
}

// A budget has room for idle blocks as for activations. Where even the least plan has none, a note
// says so and the plan is made: a run that began by a budget is not ended by what it measures.
TEST(RegionBlocks, ABudgetCountsIdleOnesWhereItCan) {
  Planning planning;
  planning.replays = true;
  planning.profile = profile_of(kNone);
  const auto units = fsdp::units_of(4);
  ForwardActivations activations{.outside = 0, .after = 0, .units = {}};
  for (const auto* unit : {"layer 1", "layer 2", "layer 3"}) {
    activations.units.push_back({unit, 100, 100, 100, 100, 100});
  }
  planning.activations = activations;
  const auto eager =
      eager_choices(record(), {false, true, true, true}, fsdp::ReduceAt::kLastBackward,
                    fsdp::PlanOrder::kOneAfterTheOther);
  const auto problem_in = [&](std::optional<std::int64_t> budget) {
    planning.memory_budget = budget;
    return problem_of(planning, record(), units, eager, fsdp::PlanOrder::kOneAfterTheOther);
  };
  const auto free = problem_in(std::nullopt);
  EXPECT_EQ(free.blocks, blocks_of(*planning.profile));
  EXPECT_EQ(most_activations(activations_of(activations, units), record(),
                             std::vector<RecomputeMode>(4, kNone), free.blocks),
            300 + 20)
      << "what is scratch is idle behind the last of them";
  activations.after = 70;
  EXPECT_EQ(most_activations(activations_of(activations, units), record(),
                             {kNone, kNone, kNone, kFull}, free.blocks),
            300 + 70 + 60)
      << "what runs again has its blocks all the time";
  const auto least = least_bytes(free);
  EXPECT_EQ(problem_in(least).blocks, free.blocks);
  EXPECT_EQ(peak_bytes(free, make_plan(record(), units, eager, free.order)),
            20 + peak_bytes(problem_in(least - 1), make_plan(record(), units, eager, free.order)));
  const auto chosen = choose(problem_in(least - 1));
  EXPECT_THAT(chosen.notes, Contains(Says("up to 20 B, come on top of the budget")));
  planning.replays = false;
  EXPECT_TRUE(problem_in(std::nullopt).blocks.empty());
}

}  // namespace
}  // namespace tessera::capture::passes_test
