// [Note: collective order]: a backward issues one list, whichever of its places a rank passes.

#include <array>
#include <random>

#include "fsdp/agreed/pass_planner.h"
#include "support/test.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::backward_plan_test {
namespace {

/// Units that are gathered in backward and released after it; the root stays unsharded.
std::vector<PlanUnit> resharding(std::size_t count) {
  std::vector<PlanUnit> units(count);
  for (std::size_t i = 0; i < count; ++i) {
    units[i].gathers = i > 0;
    units[i].reduces = true;
  }
  return units;
}

/// A backward through all of it.
StageRecord all_of(std::vector<Trace> parts) {
  StageRecord record;
  for (const auto& part : parts) record.reached.emplace_back(part.units.size(), true);
  record.parts = std::move(parts);
  return record;
}

PassPlan plan_of(const StageRecord& record, const std::vector<PlanUnit>& units) {
  std::vector<bool> releases(units.size(), true);
  releases.at(0) = false;
  return plan_backward(record, units, releases);
}

/// "gather 2", "release 2", "reduce 2": without waits, which issue nothing.
std::vector<std::string> text(const PassPlan& plan) {
  std::vector<std::string> lines;
  for (const auto& [kind, unit] : plan.actions) {
    if (kind != PlanAction::Kind::kWait) lines.push_back(concat(to_string(kind), " ", unit));
  }
  return lines;
}

std::vector<std::string> plan_text(const Trace& trace, const std::vector<PlanUnit>& units) {
  return text(plan_of(all_of({trace}), units));
}

TEST(BackwardPlan, IsTheReverseOfTheForward) {
  EXPECT_THAT(plan_text(flat({0, 1, 2}), resharding(3)),
              ElementsAre("gather 2", "gather 1", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

TEST(BackwardPlan, TheNextUnitIsGatheredWhileOneComputes) {
  const auto plan = plan_of(all_of({flat({0, 1, 2, 3})}), resharding(4));
  const auto& places = plan.places.at(0);
  const auto gathers_before = [&](std::size_t count) {
    std::size_t gathers = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (plan.actions[i].kind == PlanAction::Kind::kGather) ++gathers;
    }
    return gathers;
  };
  EXPECT_EQ(gathers_before(places[0].ahead), 1U);
  EXPECT_EQ(gathers_before(places[3].needed), 1U);
  EXPECT_EQ(gathers_before(places[3].ahead), 2U);
  EXPECT_EQ(gathers_before(places[2].ahead), 3U);
}

TEST(BackwardPlan, WhatIsUnshardedAlreadyIsNotGathered) {
  auto units = resharding(3);
  units[2].gathered = true;
  EXPECT_THAT(plan_text(flat({0, 1, 2}), units), ElementsAre("gather 1", "release 2", "reduce 2",
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
  const auto places = backward_places(all_of({{{0, 1, 2}, {1}, {0, 0, 0}}}));
  std::vector<std::size_t> begun;
  for (const auto& place : places) {
    if (place.begins) begun.push_back(place.position);
  }
  EXPECT_THAT(begun, ElementsAre(0, 2, 1));
}

// Naive: units of the newer forward are reduced without what the older one adds.
TEST(BackwardPlan, SeveralForwardsAreReducedOnceAfterTheOldest) {
  const auto trace = flat({0, 1});
  const auto plan = plan_of(all_of({trace, trace}), resharding(2));
  EXPECT_THAT(text(plan), ElementsAre("gather 1", "release 1", "gather 1", "release 1", "reduce 1",
                                      "reduce 0"));
  EXPECT_EQ(plan.places.size(), 2U);
}

// Naive: places in reverse of the forward, so that the first recomputed unit does the reductions of
// those after it, whose backward has not run.
TEST(BackwardPlan, ACheckpointGathersInTheOrderInWhichItRunsAgain) {
  Trace trace = flat({0, 1, 2, 3});
  trace.checkpoints = {0, 7, 7, 0};
  const auto plan = plan_of(all_of({trace}), resharding(4));
  EXPECT_THAT(text(plan),
              ElementsAre("gather 3", "gather 1", "release 3", "reduce 3", "gather 2", "release 2",
                          "reduce 2", "release 1", "reduce 1", "reduce 0"));
}

TEST(BackwardPlan, ACheckpointMaySpanForwards) {
  Trace older = flat({0, 1});
  Trace newer = flat({0, 2});
  older.checkpoints = newer.checkpoints = {1, 1};
  const auto plan = plan_of(all_of({older, newer}), resharding(3));
  EXPECT_THAT(text(plan), ElementsAre("gather 1", "gather 2", "release 2", "reduce 2", "release 1",
                                      "reduce 1", "reduce 0"));
}

TEST(BackwardPlan, WhereBackwardDoesNotComeNothingIsGatheredButGradientsAreSummed) {
  auto record = all_of({flat({0, 1, 2})});
  record.reached[0][1] = false;
  EXPECT_THAT(text(plan_of(record, resharding(3))),
              ElementsAre("gather 2", "release 2", "reduce 2", "reduce 1", "reduce 0"));
  EXPECT_THAT(plan_of({}, resharding(3)).actions, IsEmpty());
}

// Naive: the owner of shared parameters is gathered where some rank happens to need it.
TEST(BackwardPlan, AnOwnerIsGatheredWithTheUnitThatSharesItAndReducedAfterThat) {
  auto states = resharding(3);
  states[0].gathers = true;
  states[2].owners = {0};
  const Trace trace{{1, 2}, {0, 1}, {0, 0}};  // called directly: the root has no forward
  EXPECT_THAT(plan_text(trace, states),
              ElementsAre("gather 0", "gather 2", "gather 1", "release 2", "reduce 2", "reduce 0",
                          "release 1", "reduce 1"));
}

TEST(BackwardPlan, AListOfTheUserTakesTheNextUnitsPlace) {
  auto states = resharding(5);
  states[4].backward_prefetch = {1, 3};
  // While 4 computes 1 and 3 are gathered; 2 waits until 3 computes.
  EXPECT_THAT(plan_text(flat({0, 1, 2, 3, 4}), states),
              ElementsAre("gather 4", "gather 1", "gather 3", "release 4", "reduce 4", "gather 2",
                          "release 3", "reduce 3", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

// Naive: gathered twice, or never.
TEST(BackwardPlan, AListMayNameUnitsThatRanBeforeOrTwiceOrNotAtAll) {
  auto states = resharding(4);
  states[0].backward_prefetch = {1, 3};
  states[1].backward_prefetch = {1, 1, 0};
  states[2].backward_prefetch = {2};
  EXPECT_THAT(plan_text(flat({0, 1, 2, 1}), states),
              ElementsAre("gather 1", "gather 2", "release 2", "reduce 2", "release 1", "reduce 1",
                          "reduce 0"));
}

// ---------------------------------------------------------------------------------------- ranks

struct Drawn {
  StageRecord record;
  std::vector<PlanUnit> units;
  std::vector<bool> releases;
  PassPlan plan() const { return plan_backward(record, units, releases); }
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
  drawn.units = std::vector<PlanUnit>(units);
  for (auto& unit : drawn.units) {
    unit.gathers = random() % 4 != 0;
    unit.gathered = unit.gathers && random() % 4 == 0;
    drawn.releases.push_back(random() % 3 != 0);
    unit.reduces = random() % 4 != 0;
    if (random() % 4 == 0) unit.backward_prefetch = {static_cast<UnitId>(random() % units)};
    if (random() % 4 == 0) unit.owners = {static_cast<UnitId>(random() % units)};
  }
  for (UnitId i = 0; i < units; ++i) std::erase(drawn.units[i].owners, i);
  std::uint32_t checkpoints = 0;
  const auto count = 1 + random() % 3;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& trace = drawn.record.parts.emplace_back(draw_trace(random, units, checkpoints));
    auto& reached = drawn.record.reached.emplace_back();
    for (const auto checkpoint : trace.checkpoints) {
      reached.push_back(checkpoint != 0 || random() % 4 != 0);
    }
  }
  return drawn;
}

/// Walks through a plan as a rank that passes all places: every unit that it needs is gathered and
/// waited for, no unit is gathered that is unsharded or released that is in use, and each is
/// reduced once, at the end of its last place.
void expect_usable(const Drawn& drawn, const PassPlan& plan) {
  std::set<std::array<std::size_t, 3>> passed;
  std::vector<bool> gathered, readable;
  for (const auto& unit : drawn.units) gathered.push_back(unit.gathered);
  readable = gathered;
  std::vector<int> active(gathered.size()), reduced(gathered.size());
  std::vector<bool> has_places(gathered.size());
  std::size_t done = 0;
  const auto run = [&](std::size_t count) {
    ASSERT_LE(done, count) << "places in another order than their times";
    for (; done < count; ++done) {
      const auto& [kind, unit] = plan.actions[done];
      if (kind == PlanAction::Kind::kGather) {
        EXPECT_FALSE(gathered[unit]);
        gathered[unit] = true;
      } else if (kind == PlanAction::Kind::kWait) {
        EXPECT_TRUE(gathered[unit]);
        readable[unit] = true;
      } else if (kind == PlanAction::Kind::kRelease) {
        EXPECT_EQ(active[unit], 0) << "released while its backward runs";
        gathered[unit] = readable[unit] = false;
      } else {
        ++reduced[unit];
      }
    }
  };
  for (const auto& [part, position, begins] : backward_places(drawn.record)) {
    EXPECT_TRUE(passed.insert({part, position, begins ? 1U : 0U}).second);
    EXPECT_TRUE(begins || passed.contains({part, position, 1U}));
    const auto& place = plan.places.at(part).at(position);
    const auto unit = drawn.record.parts[part].units[position];
    const bool reached = drawn.record.reached[part][position];
    auto users = drawn.units[unit].owners;
    users.push_back(unit);
    if (begins) {
      run(place.needed);
      for (const auto one : users) {
        EXPECT_EQ(reduced[one], 0) << "reduced before its last backward";
        if (!reached) continue;
        ++active[one];
        EXPECT_TRUE(readable[one] || !drawn.units[one].gathers);
      }
      run(place.ahead);
    } else {
      for (const auto one : users) {
        EXPECT_EQ(reduced[one], 0);
        has_places[one] = true;
        if (reached) --active[one];
      }
      run(place.after);
    }
  }
  std::size_t places = 0;
  for (const auto& part : drawn.record.parts) places += 2 * part.units.size();
  EXPECT_EQ(passed.size(), places);
  for (auto left = done; left < plan.actions.size(); ++left) {
    EXPECT_NE(plan.actions[left].kind, PlanAction::Kind::kGather) << "left for the end";
    EXPECT_NE(plan.actions[left].kind, PlanAction::Kind::kReduce) << "left for the end";
  }
  run(plan.actions.size());
  for (std::size_t unit = 0; unit < reduced.size(); ++unit) {
    EXPECT_EQ(reduced[unit], drawn.units[unit].reduces && has_places[unit] ? 1 : 0);
  }
}

TEST(BackwardPlan, ADrawnProgramHasWhatItNeedsWhereItNeedsIt) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const auto drawn = draw(seed);
    expect_usable(drawn, drawn.plan());
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

/// Waits for a gather, and a reduction where no more than one is under way.
bool blocks(PlanAction::Kind kind) {
  return kind == PlanAction::Kind::kWait || kind == PlanAction::Kind::kReduce;
}

/// One rank that passes some places only.
struct Rank {
  std::vector<std::size_t> stops;  ///< actions to have done, in the order of its places
  std::size_t stop = 0;
  std::size_t done = 0;
};

// Naive: reductions go out when the gradients of one rank are complete. One rank then waits for a
// reduction that another, which waits for a gather of the first, has not issued.
TEST(BackwardPlan, RanksThatComeByAtDifferentPlacesNeverWaitForEachOther) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const auto drawn = draw(seed);
    const auto plan = drawn.plan();
    const auto& actions = plan.actions;
    std::mt19937 random(seed);
    std::vector<Rank> ranks(3);
    for (auto& rank : ranks) {
      for (const auto& [part, position, begins] : backward_places(drawn.record)) {
        const auto& place = plan.places[part][position];
        if (random() % 2 == 0) rank.stops.push_back(begins ? place.needed : place.after);
      }
      rank.stops.push_back(actions.size());
    }
    // A rank does one action at a time; after one that blocks it waits until all have done that.
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& rank : ranks) {
        const bool waits = rank.done > 0 && blocks(actions[rank.done - 1].kind) &&
                           std::any_of(ranks.begin(), ranks.end(),
                                       [&](const Rank& other) { return other.done < rank.done; });
        while (rank.stop < rank.stops.size() && rank.done >= rank.stops[rank.stop]) ++rank.stop;
        if (waits || rank.stop == rank.stops.size()) continue;
        ++rank.done;
        moved = true;
      }
    }
    for (const auto& rank : ranks) ASSERT_EQ(rank.done, actions.size()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::fsdp::backward_plan_test
