// The pass `recompute`: bytes go where they save most time, nothing exceeds the budget, and what a
// user has set stays.
#include "capture/recompute_pass.h"

#include "capture/plan_text.h"
#include "capture/simulate_plan.h"
#include "fsdp/agreed/step_plan_check.h"
#include "support/test.h"
#include "tessera/compile.h"
#include "unit/capture/drawn_problem.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::recompute_pass_test {
namespace {

using fsdp::Draw;
using fsdp::flat;
using fsdp::Keep;
using fsdp::RecomputeBy;
using enum RecomputeMode;
using Names = std::vector<std::string>;

struct Layer {
  std::int64_t none, selective, full;
  double forward_ms;
};

/// The root of 10 bytes, which stays, around layers without any, whose gathers are nothing.
PlanProblem problem_of(const std::vector<Layer>& layers, std::optional<std::int64_t> budget = {}) {
  PlanProblem problem;
  std::vector<fsdp::UnitId> all{0};
  std::vector<bool> resharded{false};
  problem.units = fsdp::units_of(1 + layers.size());
  problem.units[0].bytes = 10;
  ForwardActivations activations{.outside = 5, .after = 0, .units = {}};
  problem.profile.units.push_back({.name = problem.units[0].name, .gather_ms = 0.0});
  for (std::size_t i = 0; i < layers.size(); ++i) {
    auto& unit = problem.units[i + 1];
    unit.bytes = 0;
    unit.recompute_by = RecomputeBy::kPlan;
    all.push_back(static_cast<fsdp::UnitId>(i + 1));
    resharded.push_back(true);
    const auto& [none, selective, full, ms] = layers[i];
    activations.units.push_back({unit.name, none, selective, full, none, none});
    problem.profile.units.push_back({unit.name, ms, 2 * ms, 0.0, 0.0});
  }
  problem.record = fsdp::record_of({flat(all)});
  problem.eager =
      eager_choices(problem.record, resharded, fsdp::ReduceAt::kLastBackward, problem.order);
  problem.activations = activations_of(activations, problem.units);
  problem.memory_budget = budget;
  return problem;
}

std::string refused(const auto& act) {
  return refusal_of(ErrorKind::kConfig, [&] { act(); });
}

// Counted by hand: layers of 100 bytes, of which 10 are left when all of them are forgotten.
TEST(Activations, TheMostIsAtTheEndOfForwardOrWhereALayerRunsAgain) {
  const auto problem = problem_of({{100, 40, 10, 1}, {100, 40, 10, 1}, {100, 40, 10, 1}});
  const auto most = [&](std::vector<RecomputeMode> modes, std::int64_t after = 0) {
    auto of = *problem.activations;
    of.after = after;
    modes.insert(modes.begin(), kNone);
    return most_activations(of, problem.record, modes);
  };
  EXPECT_EQ(most({kNone, kNone, kNone}), 5 + 300);
  EXPECT_EQ(most({kFull, kFull, kFull}), 5 + 10 + 10 + 100) << "the last one runs again";
  EXPECT_EQ(most({kFull, kFull, kNone}), 5 + 10 + 10 + 100) << "as it would, had it stayed";
  EXPECT_EQ(most({kNone, kFull, kFull}), 5 + 100 + 10 + 100);
  EXPECT_EQ(most({kSelective, kFull, kNone}), 5 + 40 + 10 + 100);
  // The activations of later units have been freed by then.
  EXPECT_EQ(most({kFull, kFull, kFull}, 80), 5 + 30 + 80 + 10);
  EXPECT_EQ(most({kFull, kFull, kNone}, 80), 5 + 10 + 10 + 100 + 80);
}

TEST(Activations, AreOfUnitsOfTheModel) {
  const auto units = fsdp::units_of(3);
  const auto with = [&](UnitActivations one) {
    return refused([&] { activations_of({.units = {one, {.unit = "layer 2"}}}, units); });
  };
  EXPECT_EQ(with({"layer 1", 9, 5, 1, 9, 9}), "");
  EXPECT_THAT(with({"layer 7", 9, 5, 1, 9, 9}), Says("'layer 7', expected one of the 3"));
  EXPECT_THAT(with({"layer 2", 9, 5, 1, 9, 9}), Says("'layer 2' twice"));
  EXPECT_THAT(with({"layer 1", 9, 5, -1, 9, 9}), Says("found 9 bytes in mode none"));
  EXPECT_THAT(with({"layer 1", 9, 5, 1, 9, 0}), Says("no less again than kept"));
  EXPECT_THAT(refused([&] { activations_of({.after = -1}, units); }), Says("-1 after them"));
}

// Naive: the largest is kept, or the first; here the one that takes longest to compute again.
TEST(RecomputePass, WhatTakesLongestAByteIsKept) {
  // The last one of all that are recomputed runs again.
  auto problem =
      problem_of({{100, 100, 10, 1}, {100, 100, 10, 9}, {200, 200, 10, 10}}, 5 + 220 + 10);
  EXPECT_EQ(least_bytes(problem, Names{"recompute"}), 5 + 20 + 200 + 10);
  const auto chosen = choose(problem, Names{"recompute"});
  EXPECT_THAT(chosen.choices.recompute, ElementsAre(kNone, kFull, kFull, kNone));
  problem.memory_budget = 5 + 10 + 100 + 200 + 10;
  EXPECT_THAT(choose(problem, Names{"recompute"}).choices.recompute,
              ElementsAre(kNone, kFull, kNone, kNone));
  problem.memory_budget = 1000;
  const auto all = choose(problem, Names{"recompute"});
  EXPECT_THAT(all.choices.recompute, Each(kNone));
  EXPECT_THAT(all.recompute_reasons[3], Says("its 190 B of activations fit, 10 ms"));
}

// The one that saves most a byte is too large; those behind it are still looked at.
TEST(RecomputePass, OneThatDoesNotFitIsSkipped) {
  auto problem =
      problem_of({{60, 60, 10, 1}, {500, 500, 10, 400}, {60, 60, 10, 1}, {500, 500, 10, 1}});
  problem.memory_budget = least_bytes(problem, Names{"recompute"}) + 100;
  const auto chosen = choose(problem, Names{"recompute"});
  EXPECT_THAT(chosen.choices.recompute, ElementsAre(kNone, kNone, kFull, kNone, kNone));
  EXPECT_LE(peak_bytes(problem, plan_of(problem, chosen)), *problem.memory_budget);
}

// Products are kept first, where theirs are the better bytes: a third of the time is left.
TEST(RecomputePass, SelectiveIsAStepOnTheWay) {
  auto problem = problem_of({{100, 30, 10, 9}, {100, 30, 10, 9}});
  const auto least = least_bytes(problem, Names{"recompute"});
  EXPECT_EQ(least, 5 + 10 + 100 + 10);
  const auto at = [&](std::int64_t more) {
    problem.memory_budget = least + more;
    return choose(problem, Names{"recompute"}).choices.recompute;
  };
  EXPECT_THAT(at(19), ElementsAre(kNone, kFull, kNone)) << "the last one takes its bytes anyway";
  EXPECT_THAT(at(20), ElementsAre(kNone, kSelective, kNone));
  EXPECT_THAT(at(89), ElementsAre(kNone, kSelective, kNone));
  EXPECT_THAT(at(90), ElementsAre(kNone, kNone, kNone));
  // Products that are most of it are not worth their bytes before all of it is.
  problem = problem_of({{100, 95, 10, 9}, {100, 95, 10, 9}});
  EXPECT_THAT(at(84), ElementsAre(kNone, kFull, kNone));
  EXPECT_THAT(at(89), ElementsAre(kNone, kSelective, kNone)) << "what is left";
  EXPECT_THAT(at(90), ElementsAre(kNone, kNone, kNone));
}

// Gathers against forwards: the budget has room for one of the two.
TEST(RecomputePass, TradesActivationsAgainstWhatStaysGathered) {
  auto problem = problem_of({{100, 100, 10, 2}, {100, 100, 10, 1}, {100, 100, 10, 1}});
  problem.micro_batches = 4;
  for (std::size_t i = 1; i < problem.units.size(); ++i) problem.units[i].bytes = 90;
  // Behind what is gathered one ahead.
  problem.memory_budget = least_bytes(problem) + 90 + 90;
  const auto chosen = [&](double gather_ms, const Names& names) {
    problem.profile.units[1].gather_ms = gather_ms;
    const auto found = choose(problem, names);
    EXPECT_LE(peak_bytes(problem, plan_of(problem, found)), *problem.memory_budget);
    return found.choices;
  };
  const Names both{"recompute", "keep"};
  EXPECT_EQ(chosen(0.01, both).recompute[1], kNone);
  EXPECT_NE(chosen(0.01, both).keep[1], Keep::kUpdate);
  EXPECT_EQ(chosen(5.0, both).recompute[1], kFull);
  EXPECT_EQ(chosen(5.0, both).keep[1], Keep::kUpdate);
  EXPECT_EQ(chosen(5.0, {"recompute"}).recompute[1], kNone) << "keep was not asked for";
}

TEST(RecomputePass, WhatAUserHasSetStays) {
  auto problem = problem_of({{100, 40, 10, 1}, {100, 40, 10, 1}}, 1000);
  problem.units[1].recompute_by = RecomputeBy::kUser;
  problem.eager.recompute[1] = kFull;
  const auto chosen = choose(problem);
  EXPECT_THAT(chosen.choices.recompute, ElementsAre(kNone, kFull, kNone));
  EXPECT_EQ(chosen.recompute_reasons[1], "as activation_checkpoint.mode or set_recompute says");
  problem.units[2].recompute_by = RecomputeBy::kUser;
  EXPECT_THAT(choose(problem).notes,
              Contains(Says("pass recompute is left out, since no layer keeps less")));
  EXPECT_THAT(refused([&] { choose(problem, Names{"recompute"}); }),
              Says("found recompute without layers that keep less when they are recomputed"));
}

TEST(RecomputePass, WhatItNeedsIsNamed) {
  auto problem = problem_of({{100, 40, 10, 1}});
  const auto with = [&](const Names& names) { return refused([&] { choose(problem, names); }); };
  EXPECT_THAT(with({"recompute"}), Says("recompute without compile.memory_budget"));
  problem.memory_budget = 1000;
  problem.micro_batches = 2;
  EXPECT_EQ(with({"recompute", "keep", "prefetch"}), "");
  EXPECT_THAT(with({"keep", "recompute"}),
              Says("recompute behind a pass that has decided what is kept"));
  EXPECT_THAT(with({"prefetch", "recompute"}), Says("has decided how far ahead"));
  problem.activations.reset();
  EXPECT_THAT(with({"recompute"}), Says("recompute without activations that are known"));
  problem.memory_budget = 3;
  EXPECT_THAT(with({"keep"}), Says("3 bytes for gathered parameters, expected at least 10"));
}

TEST(RecomputePass, BelowTheLeastTheLeastIsNamed) {
  auto problem = problem_of({{100, 40, 10, 1}, {100, 40, 10, 1}}, 20);
  const auto least = least_bytes(problem);
  EXPECT_LT(least, least_bytes(problem, Names{"keep"})) << "no unit is recomputed";
  EXPECT_THAT(
      refused([&] { choose(problem); }),
      Says(concat("20 bytes for gathered parameters and activations, expected at least ", least)));
  problem.memory_budget = least;
  EXPECT_EQ(peak_bytes(problem, plan_of(problem, choose(problem))), least);
}

// A plan says so where the backward begins, with its reason, and a step takes that much longer.
TEST(RecomputePass, ThePlanSaysWhereAndItsTimeHasIt) {
  auto problem = problem_of({{100, 100, 10, 3}, {100, 100, 10, 3}});
  problem.memory_budget = least_bytes(problem);
  const auto chosen = choose(problem, Names{"recompute"});
  const auto plan = plan_of(problem, chosen);
  EXPECT_THAT(fsdp::faults_of(plan), IsEmpty());
  const auto text = to_text(plan, chosen, 1);
  EXPECT_THAT(text, Says("while layer 1 computes: recompute layer 1 (full: leaves 90 B of "
                         "activations to others for 3 ms a micro-batch)"));
  EXPECT_THAT(choices_text(plan, chosen),
              Says("    recomputed, full: leaves 90 B",
                   "    recomputed, none: its 90 B of activations fit"));
  const auto step = simulate(plan, problem.profile, 3);
  EXPECT_DOUBLE_EQ(step.again_ms, 3 * 3.0);
  auto none = chosen.choices;
  none.recompute.assign(3, kNone);
  const auto without = make_plan(problem.record, problem.units, none, problem.order);
  EXPECT_DOUBLE_EQ(step.step_ms, simulate(without, problem.profile, 3).step_ms + 3 * 3.0);
}

// For any traces, costs, bytes and budgets: never over the budget, the same every time, nothing of
// a user's changed; and with more memory no more time is spent on forwards again.
TEST(RecomputePass, DrawnProblemsStayWithinTheirBudgets) {
  int chosen_some = 0;
  int refusals = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    Draw draw(seed);
    PlanProblem problem;
    const auto count = 2 + draw.below(5);
    if (draw.coin()) {
      problem.record = draw.record(1, count);
    } else {
      std::vector<fsdp::UnitId> all;
      for (std::size_t i = 0; i < count; ++i) all.push_back(static_cast<fsdp::UnitId>(i));
      problem.record = fsdp::record_of({flat(all)});
    }
    problem.units = draw.units(count);
    std::vector<bool> resharded;
    for (std::size_t i = 0; i < count; ++i) resharded.push_back(draw.below(4) != 0);
    problem.eager =
        eager_choices(problem.record, resharded, fsdp::ReduceAt::kLastBackward, problem.order);
    ForwardActivations activations;
    activations.outside = static_cast<std::int64_t>(draw.below(20));
    activations.after = static_cast<std::int64_t>(draw.below(50));
    for (std::size_t i = 0; i < count; ++i) {
      auto& unit = problem.units[i];
      if (unit.recompute_by == RecomputeBy::kUser) {
        problem.eager.recompute[i] = static_cast<RecomputeMode>(draw.below(3));
      }
      UnitActivations of{.unit = unit.name};
      of.none = static_cast<std::int64_t>(draw.below(100));
      of.selective = static_cast<std::int64_t>(draw.below(100));
      of.full = static_cast<std::int64_t>(draw.below(40));
      of.selective_again = std::max(of.selective, of.none);
      of.full_again = std::max(of.full, of.none);
      activations.units.push_back(of);
    }
    problem.activations = activations_of(activations, problem.units);
    problem.micro_batches = static_cast<std::int64_t>(1 + draw.below(4));
    problem.form = std::array{Form::k1, Form::k2, Form::k3}.at(draw.below(3));
    problem.profile = default_profile(problem.units);
    for (auto& unit : problem.profile.units) {
      unit.forward_ms = static_cast<double>(draw.below(30)) / 10.0;
      if (draw.coin()) unit.gather_ms = static_cast<double>(draw.below(30)) / 10.0;
    }
    const auto least = least_bytes(problem);
    problem.memory_budget = least - 5 + static_cast<std::int64_t>(draw.below(100));
    if (*problem.memory_budget < least) {
      ++refusals;
      ASSERT_THAT(refused([&] { choose(problem); }), Says("expected at least")) << seed;
      continue;
    }
    const auto chosen = choose(problem);
    ASSERT_EQ(choose(problem), chosen) << seed;
    const auto plan = plan_of(problem, chosen);
    ASSERT_THAT(fsdp::faults_of(plan), IsEmpty()) << seed;
    ASSERT_LE(peak_bytes(problem, plan), *problem.memory_budget) << seed;
    const auto may = units_to_recompute(problem);
    for (std::size_t i = 0; i < count; ++i) {
      const auto mode = chosen.choices.recompute[i];
      ASSERT_TRUE(may[i] || mode == problem.eager.recompute[i]) << seed;
      chosen_some += may[i] && mode != kNone ? 1 : 0;
    }
    // What is recomputed does not fit in addition to what was chosen, one layer at a time.
    for (std::size_t i = 0; i < count; ++i) {
      auto more = chosen.choices;
      if (!may[i] || more.recompute[i] == kNone) continue;
      more.recompute[i] = kNone;
      const auto other = make_plan(problem.record, problem.units, more, problem.order);
      ASSERT_GT(peak_bytes(problem, other), *problem.memory_budget) << seed << ", unit " << i;
    }
  }
  EXPECT_GT(chosen_some, 100);
  EXPECT_GT(refusals, 3);
}

}  // namespace
}  // namespace tessera::capture::recompute_pass_test
