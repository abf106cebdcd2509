// The order of collectives as a value: what a backward over a trace issues, and how a difference is
// told.
#include "fsdp/order.h"

#include <gmock/gmock.h>

#include <set>

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<bool> kReshards = {false, true, true, true};  // 0 is the root

TEST(BackwardOrder, IsTheReverseOfTheForward) {
  const auto order = backward_order({{0, 1, 2, 3}}, kReshards, /*keep_last=*/false);
  EXPECT_THAT(order.positions, ElementsAre(3U, 2U, 1U, 0U));
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, true));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, TheLastUnitThatKeptItsMemoryIsNotGathered) {
  const auto order = backward_order({{0, 1, 2, 3}}, kReshards, /*keep_last=*/true);
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, false));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, AUnitUsedTwiceIsGatheredTwiceAndReducedOnceInReverseOfItsFirstUse) {
  const auto order = backward_order({{0, 1, 2, 1, 3}}, kReshards, /*keep_last=*/true);
  EXPECT_THAT(order.positions, ElementsAre(4U, 3U, 2U, 1U, 0U));
  EXPECT_THAT(order.gathers, ElementsAre(false, true, true, true, false));
  EXPECT_THAT(order.reductions, ElementsAre(3U, 2U, 1U, 0U));
}

TEST(BackwardOrder, UnitsThatDidNotRunAreNotReduced) {
  EXPECT_THAT(backward_order({{0, 3}}, kReshards, false).reductions, ElementsAre(3U, 0U));
  EXPECT_TRUE(backward_order({{}}, kReshards, false).reductions.empty());
  EXPECT_TRUE(backward_order({{}}, kReshards, true).gathers.empty());
}

TEST(BackwardOrder, AUnitThatKeepsItsMemoryIsNeverGatheredAgain) {
  const auto order = backward_order({{0, 1, 2}}, {false, false, false}, false);
  EXPECT_THAT(order.gathers, ElementsAre(false, false, false));
}

TEST(TraceHash, TellsOrdersApart) {
  std::set<std::uint64_t> hashes;
  const std::vector<Trace> traces = {{{}},        {{0}},    {{1}},   {{0, 1}},  {{1, 0}},
                                     {{0, 1, 1}}, {{0, 0}}, {{256}}, {{0, 256}}};
  for (const auto& trace : traces) hashes.insert(trace.hash());
  EXPECT_EQ(hashes.size(), traces.size());
  EXPECT_EQ((Trace{{0, 1}}.hash()), (Trace{{0, 1}}.hash()));
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
}  // namespace tessera::fsdp
