// The plan of a step: what it says of memory and gradients, and that a wrong one is told from a
// right one.
#include "fsdp/agreed/step_plan.h"

#include "fsdp/agreed/step_plan_check.h"
#include "support/test.h"
#include "unit/fsdp/drawn_plan.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::step_plan_test {
namespace {

using Kind = PlanAction::Kind;

StepPlan eager(const StepRecord& record, const std::vector<PlanUnit>& units,
               ReduceAt reduce = ReduceAt::kLastBackward,
               PlanOrder order = PlanOrder::kOneAfterTheOther) {
  std::vector<bool> resharded(units.size(), true);
  resharded[0] = false;
  return make_plan(record, units, eager_choices(record, resharded, reduce, order), order);
}

std::vector<std::string> text(const PassPlan& pass) {
  std::vector<std::string> lines;
  for (const auto& [kind, unit] : pass.actions) lines.push_back(concat(to_string(kind), " ", unit));
  return lines;
}

// The eager behaviour outside of a plan, as a plan: one unit ahead of the computing one is
// gathered, and each is released after it; the last one's backward comes next; the root stays.
TEST(StepPlan, EagerGathersOneAheadAndKeepsTheLast) {
  const auto plan = eager(record_of({flat({0, 1, 2})}), units_of(3));
  const auto& [forward, backward] = plan.stages[0].of(MicroBatchClass::kOnly);
  EXPECT_THAT(text(forward),
              ElementsAre("gather 0", "wait 0", "gather 1", "wait 1", "gather 2", "release 1",
                          "wait 2", "keep to backward 2", "keep to update 0"));
  EXPECT_THAT(text(backward), ElementsAre("gather 1", "release 2", "reduce 2", "wait 1",
                                          "release 1", "reduce 1", "reduce 0"));
  EXPECT_THAT(faults_of(plan), IsEmpty());
  EXPECT_EQ(peak_gathered_bytes(plan), 10 + 11 + 12);
}

// Naive: later micro-batches gather again what stays, or reduce before the last one.
TEST(StepPlan, MicroBatchesDifferInWhatIsThereAndWhatIsReduced) {
  const auto plan = eager(record_of({flat({0, 1})}), units_of(2));
  const auto of = [&](MicroBatchClass which) { return plan.stages[0].of(which); };
  EXPECT_THAT(text(of(MicroBatchClass::kMiddle).forward), Not(Contains("gather 0")));
  EXPECT_THAT(text(of(MicroBatchClass::kFirst).forward), Contains("gather 0"));
  for (const auto which : {MicroBatchClass::kFirst, MicroBatchClass::kMiddle}) {
    EXPECT_THAT(text(of(which).backward), Not(Contains(Says("reduce"))));
  }
  EXPECT_THAT(text(of(MicroBatchClass::kLast).backward), Contains("reduce 1"));
}

// ZeRO's three stages, as choices: what is gathered in a step of three micro-batches, and reduced.
TEST(StepPlan, ZeroStagesAreChoices) {
  const auto units = units_of(4);
  const auto record = record_of({flat({0, 1, 2, 3})});
  const auto counted = [&](Keep keep, ReduceAt reduce) {
    const PlanChoices choices{std::vector<Keep>(4, keep), reduce, 1, 1};
    const auto plan = make_plan(record, units, choices, PlanOrder::kOneAfterTheOther);
    EXPECT_THAT(faults_of(plan), IsEmpty());
    std::ptrdiff_t gathers = 0;
    std::ptrdiff_t reductions = 0;
    for (const auto which :
         {MicroBatchClass::kFirst, MicroBatchClass::kMiddle, MicroBatchClass::kLast}) {
      for (const auto* pass :
           {&plan.stages[0].of(which).forward, &plan.stages[0].of(which).backward}) {
        gathers += std::ranges::count(pass->actions, Kind::kGather, &PlanAction::kind);
        reductions += std::ranges::count(pass->actions, Kind::kReduce, &PlanAction::kind);
      }
    }
    return std::pair(gathers, reductions);
  };
  EXPECT_EQ(counted(Keep::kUpdate, ReduceAt::kLastBackward), std::pair(4L, 4L));
  EXPECT_EQ(counted(Keep::kUpdate, ReduceAt::kEveryBackward), std::pair(4L, 12L));
  // A forward leaves nothing, so its backward gathers all four again.
  EXPECT_EQ(counted(Keep::kNot, ReduceAt::kEveryBackward), std::pair(24L, 12L));
}

// A unit of two stages is gathered by the stage that comes first, and never twice.
TEST(StepPlan, StagesThatShareAUnitGatherItOnce) {
  StepRecord record;
  record.stages.resize(2);
  record.stages[0] = {{flat({0, 1})}, {{true, true}}};
  record.stages[1] = {{flat({0, 2})}, {{true, true}}};
  const PlanChoices choices{std::vector<Keep>(3, Keep::kUpdate), ReduceAt::kAsked, 1, 1};
  const auto plan = make_plan(record, units_of(3), choices, PlanOrder::kAny);
  EXPECT_THAT(faults_of(plan), IsEmpty());
  for (const auto& stage : plan.stages) {
    EXPECT_THAT(text(stage.of(MicroBatchClass::kFirst).forward),
                Contains("gather unless gathered 0"));
    EXPECT_THAT(text(stage.of(MicroBatchClass::kMiddle).forward), IsEmpty());
  }
}

// Units that are gathered before the step: a stage leaves those alone that it never uses, and which
// of two stages comes first is not known.
TEST(StepPlan, StagesReleaseOnlyWhatTheyAloneUse) {
  StepRecord record;
  record.stages.resize(2);
  record.stages[0] = {{flat({0, 1})}, {{true, true}}};
  record.stages[1] = {{flat({0, 2})}, {{true, true}}};
  auto units = units_of(3);
  for (auto& unit : units) unit.gathered = true;
  const PlanChoices choices{std::vector<Keep>(3, Keep::kNot), ReduceAt::kAsked, 1, 1};
  const auto plan = make_plan(record, units, choices, PlanOrder::kAny);
  EXPECT_THAT(faults_of(plan), IsEmpty());
  const auto& first = plan.stages[0].of(MicroBatchClass::kFirst).forward;
  EXPECT_THAT(text(first),
              ElementsAre("gather unless gathered 0", "wait 0", "release 1", "release 0"));
}

TEST(StepPlan, KeptToBackwardIsRefusedWhereOthersComeBetween) {
  const PlanChoices choices{{Keep::kBackward}, ReduceAt::kAsked, 1, 1};
  EXPECT_REFUSED(kUsage, make_plan(record_of({flat({0})}), units_of(1), choices, PlanOrder::kAny),
                 "keep them to the update");
}

// ------------------------------------------------------------------------- plans that are drawn

// Property: for any units, traces, checkpoints, reach and choices no unit is used without its
// gather, none is gathered twice, and none is left.
TEST(StepPlan, EveryPlanThatIsMadeHolds) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const auto plan = Draw(seed).plan();
    ASSERT_THAT(faults_of(plan), IsEmpty()) << "seed " << seed << "\n" << to_string(plan);
  }
}

// After the gathers ahead, which overlap with it; a unit that no backward reaches runs once.
TEST(StepPlan, AForwardRunsAgainWhereItsBackwardBegins) {
  auto units = units_of(4);
  for (auto& unit : units) unit.recompute_by = RecomputeBy::kPlan;
  auto record = record_of({flat({0, 1, 2, 3})});
  record.stages[0].reached[0][1] = false;
  EXPECT_THAT(may_be_recomputed(record, units), ElementsAre(false, true, true, true))
      << "the root has units inside";
  PlanChoices choices{std::vector<Keep>(4, Keep::kNot), ReduceAt::kLastBackward, 1, 1};
  choices.recompute = {RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective,
                       RecomputeMode::kNone};
  const auto plan = make_plan(record, units, choices, PlanOrder::kOneAfterTheOther);
  EXPECT_THAT(faults_of(plan), IsEmpty());
  for (const auto& one : plan.stages[0].micro_batches) {
    EXPECT_EQ(std::ranges::count(one.backward.actions, Kind::kRecompute, &PlanAction::kind), 1);
    const auto& place = one.backward.places[0][2];
    EXPECT_EQ(one.backward.actions[place.ahead - 1], (PlanAction{Kind::kRecompute, 2}));
    EXPECT_GT(place.ahead, place.needed);
  }
  auto other = choices;
  other.recompute[3] = RecomputeMode::kFull;
  EXPECT_NE(make_plan(record, units, other, plan.order).hash(), plan.hash());

  // Inside a checkpoint of its user it runs again as that says.
  record.stages[0].parts[0].checkpoints = {0, 1, 2, 0};
  EXPECT_THAT(may_be_recomputed(record, units), ElementsAre(false, false, false, true));
  EXPECT_THAT(faults_of(make_plan(record, units, choices, plan.order)),
              ElementsAre("unit layer 1 is to be recomputed, which no plan can tell it",
                          "unit layer 2 is to be recomputed, which no plan can tell it"));
}

TEST(StepPlan, EqualPlansHaveEqualHashesAndOthersNot) {
  std::set<std::uint64_t> hashes;
  std::vector<StepPlan> plans;
  for (unsigned seed = 0; seed < 300; ++seed) {
    auto plan = Draw(seed).plan();
    EXPECT_EQ(plan.hash(), Draw(seed).plan().hash());
    if (std::ranges::find(plans, plan) == plans.end()) plans.push_back(std::move(plan));
  }
  for (const auto& plan : plans) hashes.insert(plan.hash());
  EXPECT_EQ(hashes.size(), plans.size());
}

/// Every pass of the plan that has actions.
std::vector<PassPlan*> passes(StepPlan& plan) {
  std::vector<PassPlan*> list;
  for (auto& stage : plan.stages) {
    for (auto& one : stage.micro_batches) {
      for (auto* pass : {&one.forward, &one.backward}) {
        if (!pass->actions.empty()) list.push_back(pass);
      }
    }
  }
  return list;
}

// An action that is missing, comes twice, or is another unit's makes a plan wrong: the fault is
// found and names the unit. (A note to keep may go.)
TEST(StepPlan, AWrongPlanIsToldFromARightOne) {
  int tried = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    auto plan = Draw(seed).plan();
    Draw draw(seed + 7777);
    auto list = passes(plan);
    if (list.empty()) continue;
    auto& pass = *list[draw.below(list.size())];
    const auto at = draw.below(pass.actions.size());
    auto& action = pass.actions[at];
    const bool is_note = action.kind == Kind::kKeepToBackward || action.kind == Kind::kKeepToUpdate;
    if (is_note) continue;
    const auto shift = [&](std::size_t by) {
      for (auto& part : pass.places) {
        for (auto& place : part) {
          for (auto* end : {&place.needed, &place.ahead, &place.after}) {
            if (*end > at) *end += by;
          }
        }
      }
    };
    switch (draw.below(2)) {
      case 0:
        pass.actions.erase(pass.actions.begin() + static_cast<std::ptrdiff_t>(at));
        shift(static_cast<std::size_t>(-1));
        break;
      default:
        pass.actions.insert(pass.actions.begin() + static_cast<std::ptrdiff_t>(at), action);
        shift(1);
        break;
    }
    ++tried;
    ASSERT_THAT(faults_of(plan), Not(IsEmpty())) << "seed " << seed << ", action " << at;
  }
  EXPECT_GT(tried, 500);
}

TEST(StepPlan, PlacesOutOfOrderAndForeignUnitsAreFound) {
  const auto right = eager(record_of({flat({0, 1, 2})}), units_of(3));
  const auto first = MicroBatchClass::kFirst;
  const auto with = [&](const auto& change) {
    auto plan = right;
    change(plan, plan.stages[0].micro_batches[static_cast<std::size_t>(first)]);
    return faults_of(plan);
  };
  EXPECT_THAT(with([](auto&, auto& one) { one.forward.places[0][1].needed = 99; }),
              Contains(Says("99 of 9 actions")));
  EXPECT_THAT(with([](auto&, auto& one) { one.forward.places[0].pop_back(); }),
              Contains(Says("does not fit what was recorded")));
  EXPECT_THAT(with([](auto&, auto& one) { one.backward.actions[0].unit = 3; }),
              Contains(Says("does not fit")));
  EXPECT_THAT(with([](auto& plan, auto&) { plan.choices.keep.pop_back(); }), Not(IsEmpty()));
  EXPECT_THAT(with([](auto& plan, auto&) { plan.record.stages[0].parts[0].exits[0] = 2; }),
              Contains(Says("does not fit")));
  EXPECT_THAT(
      with([](auto&, auto& one) { std::swap(one.backward.actions[0], one.backward.actions[3]); }),
      Contains(Says("layer 1")));
}

// Naive: the end of the step reduces what is pending, so that the run is right all the same.
TEST(StepPlan, AUnitThatIsNeverReducedIsFound) {
  for (const auto reduce : {ReduceAt::kLastBackward, ReduceAt::kEveryBackward}) {
    auto plan = make_plan(record_of({flat({0, 1, 2})}), units_of(3),
                          {std::vector<Keep>(3, Keep::kUpdate), reduce, 1, 1},
                          PlanOrder::kOneAfterTheOther);
    ASSERT_THAT(faults_of(plan), IsEmpty());
    for (auto& one : plan.stages[0].micro_batches) {
      // The last actions of a backward that gathers and releases nothing.
      std::erase_if(one.backward.actions,
                    [](const PlanAction& action) { return action.kind == Kind::kReduce; });
      for (auto& place : one.backward.places[0]) place = {};
    }
    const auto faults = faults_of(plan);
    const bool every = reduce == ReduceAt::kEveryBackward;
    EXPECT_EQ(faults.size(), every ? 12U : 6U);
    EXPECT_THAT(faults, Contains("micro-batch last, backward: unit layer 2 is never reduced"));
    EXPECT_THAT(faults, Contains("micro-batch only, backward: unit the root is never reduced"));
    const std::string first = "micro-batch first, backward: unit layer 1 is never reduced";
    EXPECT_EQ(std::ranges::count(faults, first), every ? 1 : 0);
  }
}

// Actions do what was chosen, so that the choices of a file describe the plan.
TEST(StepPlan, GathersAheadAreThoseThatWereChosen) {
  const auto right = eager(record_of({flat({0, 1, 2, 3})}), units_of(4));
  ASSERT_EQ(right.choices.ahead_in_forward, 1U);
  const auto with = [&](std::size_t in_forward, std::size_t in_backward) {
    auto plan = right;
    plan.choices.ahead_in_forward = in_forward;
    plan.choices.ahead_in_backward = in_backward;
    return faults_of(plan);
  };
  EXPECT_THAT(with(1, 1), IsEmpty());
  EXPECT_THAT(with(4000, 1),
              Contains("micro-batch first, forward: unit layer 2 is not gathered while the root "
                       "computes, where 4000 units ahead were chosen"));
  EXPECT_THAT(with(0, 1), Contains(Says("unit layer 1 is gathered while the root computes, "
                                        "where 0 units ahead were chosen")));
  EXPECT_THAT(with(1, 0), Contains(Says("micro-batch last, backward: unit layer 2 is gathered "
                                        "while layer 3 computes, where 0 units")));
  EXPECT_THAT(with(1, 2), Contains(Says("unit layer 1 is not gathered while layer 3")));
  // A unit that names what is gathered meanwhile is asked for nothing else.
  auto units = units_of(4);
  for (auto& unit : units) unit.forward_prefetch = {3};
  auto named = make_plan(right.record, units, right.choices, right.order);
  named.choices.ahead_in_forward = 4000;
  EXPECT_THAT(faults_of(named), IsEmpty());
}

TEST(StepPlan, ABudgetIsNeverExceeded) {
  const auto plan = eager(record_of({flat({0, 1, 2})}), units_of(3));
  EXPECT_THAT(faults_of(plan, 33), IsEmpty());
  EXPECT_THAT(faults_of(plan, 32), Contains(Says("over the budget of 32")));
}

}  // namespace
}  // namespace tessera::fsdp::step_plan_test
