// [Note: collective order]: what a backward issues is one list, whatever of it a rank comes by.
#include "fsdp/agreed/backward_plan.h"

#include <gmock/gmock.h>

#include <deque>
#include <random>

#include "tessera/error.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::backward_plan_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Units that are gathered in backward and released after it; the root stays unsharded.
std::vector<UnitState> resharding(std::size_t count) {
  std::vector<UnitState> states(count);
  for (std::size_t i = 0; i < count; ++i) {
    states[i].gathers = states[i].releases = i > 0;
    states[i].gathered = i == 0;
    states[i].reduces = true;
  }
  return states;
}

ReachedForward all_of(const Trace& trace, std::uint32_t number = 0) {
  return {number, &trace, std::vector<bool>(trace.units.size(), true)};
}

/// "gather 2", "release 2", "reduce 2".
std::vector<std::string> text(const BackwardPlan& plan) {
  std::vector<std::string> lines;
  for (const auto& step : plan.steps) {
    const auto* kind = step.kind == Step::Kind::kGather    ? "gather "
                       : step.kind == Step::Kind::kRelease ? "release "
                                                           : "reduce ";
    lines.push_back(concat(kind, step.unit));
  }
  return lines;
}

std::vector<std::string> plan_text(const Trace& trace, std::vector<UnitState> states) {
  return text(plan_backward({all_of(trace)}, std::move(states)));
}

TEST(BackwardPlan, IsTheReverseOfTheForward) {
  EXPECT_THAT(plan_text(flat({0, 1, 2}), resharding(3)),
              ElementsAre("gather 2", "gather 1", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

TEST(BackwardPlan, TheNextUnitIsGatheredWhileOneComputes) {
  const auto trace = flat({0, 1, 2, 3});
  const auto plan = plan_backward({all_of(trace)}, resharding(4));
  const auto& places = plan.places.at(0);
  const auto gathers_before = [&](std::size_t count) {
    std::size_t gathers = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (plan.steps[i].kind == Step::Kind::kGather) ++gathers;
    }
    return gathers;
  };
  EXPECT_EQ(gathers_before(places[0].ahead), 1U);
  EXPECT_EQ(gathers_before(places[3].needed), 1U);
  EXPECT_EQ(gathers_before(places[3].ahead), 2U);
  EXPECT_EQ(gathers_before(places[2].ahead), 3U);
}

TEST(BackwardPlan, WhatIsUnshardedAlreadyIsNotGathered) {
  auto states = resharding(3);
  states[2].gathered = true;
  EXPECT_THAT(plan_text(flat({0, 1, 2}), states), ElementsAre("gather 1", "release 2", "reduce 2",
                                                              "release 1", "reduce 1", "reduce 0"));
}

// Naive: released after its last use in forward, and gathered again for the use that comes next.
TEST(BackwardPlan, AUnitThatComesAgainNextKeepsItsMemory) {
  EXPECT_THAT(plan_text(flat({0, 1, 1}), resharding(2)),
              ElementsAre("gather 1", "release 1", "reduce 1", "reduce 0"));
}

TEST(BackwardPlan, AUnitUsedTwiceIsReducedOnceAfterItsFirstUse) {
  EXPECT_THAT(plan_text(flat({0, 1, 2, 1}), resharding(3)),
              ElementsAre("gather 1", "gather 2", "release 1", "gather 1", "release 2", "reduce 2",
                          "release 1", "reduce 1", "reduce 0"));
}

// Naive: the reverse of the entries. An outer unit is entered first in both directions, so
// everything inside it would be gathered before its backward begins: the whole model at once.
TEST(BackwardPlan, AnOuterUnitComesBeforeWhatIsInsideIt) {
  // 0 { 1 { 2, 3 }, 4 }
  const Trace trace{{0, 1, 2, 3, 4}, {2, 3, 1, 4, 0}, {0, 0, 0, 0, 0}};
  EXPECT_THAT(plan_text(trace, resharding(5)),
              ElementsAre("gather 4", "gather 1", "release 4", "reduce 4", "gather 3", "gather 2",
                          "release 3", "reduce 3", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

TEST(BackwardPlan, UnitsWhoseForwardHasNotEndedComeFirst) {
  const Trace trace{{0, 1, 2}, {1}, {0, 0, 0}};
  const auto plan = plan_backward({all_of(trace)}, resharding(3));
  const auto& places = plan.places.at(0);
  EXPECT_LT(places[0].begins, places[2].begins);
  EXPECT_LT(places[2].begins, places[1].begins);
}

// Naive: units of the newer forward are reduced without what the older one adds.
TEST(BackwardPlan, SeveralForwardsAreReducedOnceAfterTheOldest) {
  const auto trace = flat({0, 1});
  const auto plan = plan_backward({all_of(trace, 5), all_of(trace, 4)}, resharding(2));
  EXPECT_THAT(text(plan), ElementsAre("gather 1", "release 1", "gather 1", "release 1", "reduce 1",
                                      "reduce 0"));
  EXPECT_EQ(plan.places.size(), 2U);
}

// Naive: places in reverse of the forward, so that the first recomputed unit does the reductions of
// those after it, whose backward has not run.
TEST(BackwardPlan, ACheckpointGathersInTheOrderInWhichItRunsAgain) {
  Trace trace = flat({0, 1, 2, 3});
  trace.checkpoints = {0, 7, 7, 0};
  const auto plan = plan_backward({all_of(trace)}, resharding(4));
  EXPECT_THAT(text(plan),
              ElementsAre("gather 3", "gather 1", "release 3", "reduce 3", "gather 2", "release 2",
                          "reduce 2", "release 1", "reduce 1", "reduce 0"));
}

TEST(BackwardPlan, ACheckpointMaySpanForwards) {
  Trace older = flat({0, 1});
  Trace newer = flat({0, 2});
  older.checkpoints = newer.checkpoints = {1, 1};
  const auto plan = plan_backward({all_of(newer, 1), all_of(older, 0)}, resharding(3));
  EXPECT_THAT(text(plan), ElementsAre("gather 1", "gather 2", "release 2", "reduce 2", "release 1",
                                      "reduce 1", "reduce 0"));
}

TEST(BackwardPlan, WhereBackwardDoesNotComeNothingIsGatheredButGradientsAreSummed) {
  const auto trace = flat({0, 1, 2});
  auto forward = all_of(trace);
  forward.reached[1] = false;
  EXPECT_THAT(text(plan_backward({forward}, resharding(3))),
              ElementsAre("gather 2", "release 2", "reduce 2", "reduce 1", "reduce 0"));
  EXPECT_THAT(plan_backward({}, resharding(3)).steps, IsEmpty());
}

// Naive: whoever lends its parameters is gathered where some rank happens to need it.
TEST(BackwardPlan, ALenderIsGatheredWithItsBorrowerAndReducedAfterThat) {
  auto states = resharding(3);
  states[0].gathered = false;
  states[0].gathers = true;
  states[2].lenders = {0};
  const Trace trace{{1, 2}, {0, 1}, {0, 0}};  // called directly: the root has no forward
  EXPECT_THAT(plan_text(trace, states),
              ElementsAre("gather 0", "gather 2", "gather 1", "release 2", "reduce 2", "reduce 0",
                          "release 1", "reduce 1"));
}

TEST(BackwardPlan, AListOfTheUserTakesTheNextUnitsPlace) {
  auto states = resharding(5);
  states[4].prefetch = {1, 3};
  // While 4 computes 1 and 3 are gathered; 2 waits until 3 computes.
  EXPECT_THAT(plan_text(flat({0, 1, 2, 3, 4}), states),
              ElementsAre("gather 4", "gather 1", "gather 3", "release 4", "reduce 4", "gather 2",
                          "release 3", "reduce 3", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

// Naive: gathered twice, or never.
TEST(BackwardPlan, AListMayNameUnitsThatRanBeforeOrTwiceOrNotAtAll) {
  auto states = resharding(3);
  states[0].prefetch = {1, 9};
  states[1].prefetch = {1, 1, 0};
  states[2].prefetch = {2};
  EXPECT_THAT(plan_text(flat({0, 1, 2, 1}), states),
              ElementsAre("gather 1", "gather 2", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

// ---------------------------------------------------------------------------------------- ranks

struct Drawn {
  std::deque<Trace> traces;
  std::vector<ReachedForward> forwards;  // newest first
  std::vector<UnitState> states;
};

/// Calls nest at random; some run in checkpoints.
Trace draw_trace(std::mt19937& random, UnitId units, std::uint32_t& checkpoints) {
  Trace trace;
  std::vector<std::size_t> open;
  std::uint32_t checkpoint = 0;
  std::size_t checkpoint_depth = 0;
  const auto close = [&] {
    trace.exits.push_back(open.back());
    open.pop_back();
    if (open.size() <= checkpoint_depth) checkpoint = 0;
  };
  const auto count = 1 + random() % 8;
  for (std::size_t i = 0; i < count; ++i) {
    while (open.size() > 1 && random() % 2 == 0) close();
    if (checkpoint == 0 && random() % 4 == 0) {
      checkpoint = ++checkpoints;
      checkpoint_depth = open.size();
    }
    trace.units.push_back(i == 0 ? 0 : static_cast<UnitId>(random() % units));
    trace.checkpoints.push_back(checkpoint);
    open.push_back(i);
  }
  while (!open.empty()) close();
  return trace;
}

Drawn draw(unsigned seed) {
  std::mt19937 random(seed);
  Drawn drawn;
  const auto units = static_cast<UnitId>(1 + random() % 5);
  drawn.states = std::vector<UnitState>(units);
  for (auto& state : drawn.states) {
    state.gathers = random() % 4 != 0;
    state.gathered = random() % 4 == 0;
    state.releases = random() % 3 != 0;
    state.reduces = random() % 4 != 0;
    if (random() % 4 == 0) state.prefetch = {static_cast<UnitId>(random() % units)};
    if (random() % 4 == 0) state.lenders = {static_cast<UnitId>(random() % units)};
  }
  for (UnitId i = 0; i < units; ++i) std::erase(drawn.states[i].lenders, i);
  std::uint32_t checkpoints = 0;
  const auto count = 1 + random() % 3;
  for (std::size_t i = 0; i < count; ++i) {
    drawn.traces.push_back(draw_trace(random, units, checkpoints));
  }
  for (auto i = drawn.traces.size(); i-- > 0;) {
    const auto& trace = drawn.traces[i];
    ReachedForward forward{static_cast<std::uint32_t>(i), &trace, {}};
    for (std::size_t p = 0; p < trace.units.size(); ++p) {
      forward.reached.push_back(trace.checkpoints[p] != 0 || random() % 4 != 0);
    }
    drawn.forwards.push_back(std::move(forward));
  }
  return drawn;
}

/// Walks through a plan as a rank that comes by everywhere: whatever it needs is there, nothing is
/// gathered that is there or released that is in use, and all is reduced once, at the end of its
/// last place.
void expect_usable(const Drawn& drawn, const BackwardPlan& plan) {
  struct Moment {
    std::size_t when;
    bool begins;
    const ReachedForward* forward;
    std::size_t position;
  };
  std::map<std::size_t, Moment> moments;
  std::size_t expected = 0;
  for (const auto& forward : drawn.forwards) {
    for (std::size_t p = 0; p < forward.trace->units.size(); ++p, expected += 2) {
      const auto& places = plan.places.at(forward.number)[p];
      moments.emplace(places.begins, Moment{places.begins, true, &forward, p});
      moments.emplace(places.ends, Moment{places.ends, false, &forward, p});
      EXPECT_LT(places.begins, places.ends);
    }
  }
  ASSERT_EQ(moments.size(), expected) << "two things at one time";
  std::vector<bool> gathered;
  for (const auto& state : drawn.states) gathered.push_back(state.gathered);
  std::vector<int> active(gathered.size()), reduced(gathered.size());
  std::size_t done = 0;
  const auto run = [&](std::size_t count) {
    ASSERT_LE(done, count) << "places in another order than their times";
    for (; done < count; ++done) {
      const auto& step = plan.steps[done];
      if (step.kind == Step::Kind::kGather) {
        EXPECT_FALSE(gathered[step.unit]);
        gathered[step.unit] = true;
      } else if (step.kind == Step::Kind::kRelease) {
        EXPECT_EQ(active[step.unit], 0) << "released while its backward runs";
        gathered[step.unit] = false;
      } else {
        ++reduced[step.unit];
      }
    }
  };
  for (const auto& [when, moment] : moments) {
    const auto& places = plan.places.at(moment.forward->number)[moment.position];
    const auto unit = moment.forward->trace->units[moment.position];
    const bool reached = moment.forward->reached[moment.position];
    auto users = drawn.states[unit].lenders;
    users.push_back(unit);
    if (moment.begins) {
      run(places.needed);
      for (const auto one : users) {
        EXPECT_EQ(reduced[one], 0) << "reduced before its last backward";
        if (!reached) continue;
        ++active[one];
        EXPECT_TRUE(gathered[one] || !drawn.states[one].gathers);
      }
      run(places.ahead);
    } else {
      for (const auto one : users) {
        EXPECT_EQ(reduced[one], 0);
        if (reached) --active[one];
      }
      run(places.after);
    }
  }
  EXPECT_EQ(done, plan.steps.size()) << "left for the end";
  for (std::size_t unit = 0; unit < reduced.size(); ++unit) EXPECT_LE(reduced[unit], 1);
}

TEST(BackwardPlan, WhateverIsDrawnHasWhatItNeedsWhereItNeedsIt) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const auto drawn = draw(seed);
    expect_usable(drawn, plan_backward(drawn.forwards, drawn.states));
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

/// One rank that comes by some places only, waits for every gather that it needs and never has more
/// than one reduction under way.
struct Rank {
  std::vector<std::size_t> stops;   ///< steps to have done, in the order of its places
  std::vector<std::size_t> awaits;  ///< then waits until this many are done by all
  std::size_t stop = 0;
  std::size_t done = 0;
};

// Naive: reductions go out when a rank's own gradients are complete. One rank then waits for a
// reduction that another, which waits for a gather of the first, has not issued.
TEST(BackwardPlan, RanksThatComeByAtDifferentPlacesNeverWaitForEachOther) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const auto drawn = draw(seed);
    const auto plan = plan_backward(drawn.forwards, drawn.states);
    std::map<std::size_t, std::size_t> steps_at;  // by time
    for (const auto& [number, all] : plan.places) {
      for (const auto& places : all) {
        steps_at[places.begins] = places.needed;
        steps_at[places.ends] = places.after;
      }
    }
    std::mt19937 random(seed);
    std::vector<Rank> ranks(3);
    for (auto& rank : ranks) {
      for (const auto& [when, steps] : steps_at) {
        if (random() % 2 == 0) rank.stops.push_back(steps);
      }
      rank.stops.push_back(plan.steps.size());
    }
    // A rank does one step at a time; after a reduction it waits until all have done that step.
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& rank : ranks) {
        const bool waits = rank.done > 0 && plan.steps[rank.done - 1].kind == Step::Kind::kReduce &&
                           std::any_of(ranks.begin(), ranks.end(),
                                       [&](const Rank& other) { return other.done < rank.done; });
        while (rank.stop < rank.stops.size() && rank.done >= rank.stops[rank.stop]) ++rank.stop;
        if (waits || rank.stop == rank.stops.size()) continue;
        ++rank.done;
        moved = true;
      }
    }
    for (const auto& rank : ranks) ASSERT_EQ(rank.done, plan.steps.size()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::fsdp::backward_plan_test
