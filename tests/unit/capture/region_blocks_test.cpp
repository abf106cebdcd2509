// Blocks of replayed regions, by hand: what they take at most, what a profile tells of other modes,
// and what budgets make of them.
#include "capture/region_blocks.h"

#include <gmock/gmock.h>

#include "capture/passes.h"
#include "capture/plan_profile.h"
#include "capture/planner.h"
#include "capture/recompute_pass.h"
#include "unit/fsdp/drawn_plan.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::region_blocks_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
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
TEST(RegionBlocks, OfAModeThatNobodyMeasuredNothingIsKnown) {
  const std::vector<RecomputeMode> selective{kNone, kSelective, kSelective, kSelective};
  EXPECT_FALSE(most_blocks(profile_of(kNone), record(), selective));
  EXPECT_FALSE(most_blocks(profile_of(kSelective), record(), {kNone, kNone, kNone, kNone}));
  EXPECT_EQ(most_blocks(profile_of(kSelective), record(), selective), 150);
  EXPECT_EQ(most_blocks(profile_of(kFull), record(), {kNone, kNone, kNone, kNone}), 260);
  EXPECT_FALSE(most_blocks(default_profile(fsdp::units_of(4)), record(), selective));
}

TEST(RegionBlocks, OfSeveralRanksTheMostCountsWhoeverIsSlowest) {
  auto one = profile_of(kNone), other = profile_of(kNone);
  one.units[1].forward_ms = 100.0;
  other.units[1].blocks->bytes = {.entries = 200, .running = 210};
  one.units[2].blocks.reset();
  const auto slowest = slowest_of({one, other});
  EXPECT_EQ(slowest.units[1].forward_ms, 100.0);
  EXPECT_EQ(slowest.units[1].blocks->bytes, (UnitBlocks{.entries = 200, .running = 210}));
  EXPECT_EQ(slowest.units[2].blocks, other.units[2].blocks);
}

// A budget has room for what is idle as for activations, and where even the least has none, it is said and
// the plan is made: a run that began by a budget is not ended by what it measures.
TEST(RegionBlocks, ABudgetCountsIdleOnesWhereItCan) {
  Planning planning;
  planning.replays = true;
  planning.profile = profile_of(kNone);
  const auto units = fsdp::units_of(4);
  ForwardActivations activations{.beside = 0, .after = 0, .units = {}};
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
  EXPECT_THAT(chosen.notes, Contains(HasSubstr("up to 20 B, come on top of the budget")));
  planning.replays = false;
  EXPECT_TRUE(problem_in(std::nullopt).blocks.empty());
}

}  // namespace
}  // namespace tessera::capture::region_blocks_test
