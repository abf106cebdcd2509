// The order of collectives as a value: what a backward over a trace issues, and how a difference is
// told.
#include "fsdp/order.h"

#include <gmock/gmock.h>

#include <set>

namespace tessera::fsdp::order_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The root (0) around units that run one after the other.
Trace flat(std::vector<UnitId> units) {
  Trace trace{std::move(units), {}};
  for (std::size_t i = 1; i < trace.units.size(); ++i) trace.exits.push_back(i);
  if (!trace.units.empty()) trace.exits.push_back(0);
  return trace;
}

const std::vector<bool> kReshards = {false, true, true, true};  // 0 is the root

TEST(BackwardOrder, IsTheReverseOfTheForward) {
  const auto order = backward_order(flat({0, 1, 2, 3}), kReshards, /*keep_last=*/false);
  EXPECT_THAT(order.positions, ElementsAre(0U, 3U, 2U, 1U)) << "the root is entered first again";
  EXPECT_THAT(order.places, ElementsAre(0U, 3U, 2U, 1U));
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, true));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, TheLastUnitThatKeptItsMemoryIsNotGathered) {
  const auto order = backward_order(flat({0, 1, 2, 3}), kReshards, /*keep_last=*/true);
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, false));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, AUnitUsedTwiceIsGatheredTwiceAndReducedOnceInReverseOfItsFirstUse) {
  const auto order = backward_order(flat({0, 1, 2, 1, 3}), kReshards, /*keep_last=*/true);
  EXPECT_THAT(order.positions, ElementsAre(0U, 4U, 3U, 2U, 1U));
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, true, false));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, UnitsThatDidNotRunAreNotReduced) {
  EXPECT_THAT(backward_order(flat({0, 3}), kReshards, false).reductions, ElementsAre(3U, 0U));
  EXPECT_TRUE(backward_order(flat({}), kReshards, false).reductions.empty());
  EXPECT_TRUE(backward_order(flat({}), kReshards, true).gathers.empty());
}

// Naive: the reverse of the entries. An outer unit is entered first in both directions, so
// everything inside it would be gathered before its backward begins: the whole model at once.
TEST(BackwardOrder, AnOuterUnitComesBeforeWhatIsInsideIt) {
  // 0 { 1 { 2, 3 }, 4 }
  const Trace trace{{0, 1, 2, 3, 4}, {2, 3, 1, 4, 0}};
  const auto order = backward_order(trace, {false, true, true, true, true}, false);
  EXPECT_THAT(order.positions, ElementsAre(0U, 4U, 1U, 3U, 2U));
  EXPECT_THAT(order.places, ElementsAre(0U, 2U, 4U, 3U, 1U));
  EXPECT_THAT(order.reductions, ElementsAre(4U, 3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, UnitsWhoseForwardHasNotEndedComeFirst) {
  const Trace trace{{0, 1, 2}, {1}};
  EXPECT_THAT(backward_order(trace, kReshards, false).positions, ElementsAre(0U, 2U, 1U));
}

TEST(BackwardOrder, AUnitThatKeepsItsMemoryIsNeverGatheredAgain) {
  const auto order = backward_order(flat({0, 1, 2}), {false, false, false}, false);
  EXPECT_THAT(order.gathers, ElementsAre(false, false, false));
}

TEST(BackwardOrder, TheNextGatherGoesOutWhileAUnitComputes) {
  // Backward: the root, 2, which kept its memory, 1.
  const auto order = backward_order(flat({0, 1, 2}), kReshards, true);
  EXPECT_THAT(order.issues, ElementsAre(1U));
  EXPECT_THAT(order.needed, ElementsAre(0U, 0U, 1U));
  EXPECT_THAT(order.ahead, ElementsAre(0U, 1U, 1U));
}

TEST(BackwardOrder, AListTakesTheNextGathersPlace) {
  // While 4 computes 1 and 3 are gathered; 2 waits until 3 computes.
  const auto order = backward_order(flat({0, 1, 2, 3, 4}), {false, true, true, true, true}, false,
                                    {{}, {}, {}, {}, {1, 3}});
  EXPECT_THAT(order.issues, ElementsAre(4U, 1U, 3U, 2U));
  EXPECT_THAT(order.needed, ElementsAre(0U, 1U, 3U, 4U, 4U));
  EXPECT_THAT(order.ahead, ElementsAre(1U, 3U, 4U, 4U, 4U));
}

// Naive: gathered twice, or never.
TEST(BackwardOrder, AListMayNameUnitsThatRanBeforeOrTwiceOrNotAtAll) {
  // Backward: the root, 1 (position 3), 2, 1 (position 1).
  const auto order =
      backward_order(flat({0, 1, 2, 1}), {false, true, true}, false, {{1, 9}, {1, 1, 0}, {2}});
  EXPECT_THAT(order.issues, ElementsAre(3U, 1U, 2U));
  EXPECT_THAT(order.needed, ElementsAre(0U, 1U, 3U, 3U));
  EXPECT_THAT(order.ahead, ElementsAre(1U, 2U, 3U, 3U));
}

TEST(TraceHash, TellsOrdersApart) {
  std::set<std::uint64_t> hashes;
  const std::vector<Trace> traces = {flat({}),
                                     flat({0}),
                                     flat({1}),
                                     flat({0, 1}),
                                     flat({1, 0}),
                                     flat({0, 1, 1}),
                                     flat({0, 0}),
                                     flat({256}),
                                     flat({0, 256}),
                                     {{0, 1, 2}, {2, 1, 0}},
                                     {{0, 1, 2}, {1, 2, 0}}};
  for (const auto& trace : traces) hashes.insert(trace.hash());
  EXPECT_EQ(hashes.size(), traces.size());
  EXPECT_EQ(flat({0, 1}).hash(), flat({0, 1}).hash());
  EXPECT_EQ(hashes.count(0), 0U);
}

TEST(FirstDifference, NamesBothRanksEntries) {
  EXPECT_EQ(first_difference({{"a", "b"}, {"a", "b"}, {"a", "b"}}), "");
  EXPECT_EQ(first_difference({{"a", "b"}, {"a", "b"}, {"a", "c"}}),
            "entry 2: rank 0 entered b, rank 2 entered c");
}

TEST(FirstDifference, AShorterTraceHasNothingMore) {
  EXPECT_THAT(first_difference({{"a"}, {"a", "b"}}),
              HasSubstr("rank 0 entered nothing more, rank 1 entered b"));
  EXPECT_THAT(first_difference({{"a", "b"}, {}}),
              HasSubstr("rank 0 entered a, rank 1 entered nothing more"));
  EXPECT_EQ(first_difference({{}, {}}), "");
  EXPECT_EQ(first_difference({{"a"}}), "");
}

}  // namespace
}  // namespace tessera::fsdp::order_test
