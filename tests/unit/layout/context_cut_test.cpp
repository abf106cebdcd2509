// Cuts of a row whose owners are written down here, and what is refused in full; the properties of
// drawn cuts are in property/context_cut_property.cpp.
#include "layout/context_cut.h"

#include <cmath>
#include <limits>

#include "support/test.h"

namespace tessera::layout::context_cut_test {
namespace {

TEST(ContextCut, WithoutRanksARowIsOnePart) {
  const ContextCut whole{.positions = 5};
  EXPECT_EQ(head_tail(5, 1, 1), whole);
  EXPECT_EQ(by_work(5, 1, std::vector{7.0}), whole);
  EXPECT_THAT(whole.places_of(0), ElementsAre(0, 1, 2, 3, 4));
}

TEST(ContextCut, HeadTailGivesEachRankOnePartFromEitherEnd) {
  const ContextCut cut = head_tail(16, 2, 4);
  EXPECT_THAT(cut.owner, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(cut.places_of(0), ElementsAre(0, 1, 2, 3, 12, 13, 14, 15));
  EXPECT_THAT(cut.runs_of(1), ElementsAre(Range{4, 12}));
  EXPECT_EQ(cut.positions_of_rank(), 8);
  EXPECT_THAT(head_tail(6, 3, 6).owner, ElementsAre(0, 1, 2, 2, 1, 0));
}

TEST(ContextCut, MorePartsAreTheSamePositionsInSmallerOnes) {
  const ContextCut cut = head_tail(48, 2, 12);
  EXPECT_THAT(cut.owner, ElementsAre(0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0));
  for (const int rank : {0, 1}) {
    EXPECT_EQ(cut.places_of(rank), head_tail(48, 2, 4).places_of(rank));
  }
  EXPECT_NE(cut, head_tail(48, 2, 4));
}

TEST(ContextCut, TheLargestPartGoesFirstToTheLeastLoadedRank) {
  EXPECT_THAT(by_work(4, 2, std::vector{2.0, 9.0, 10.0, 3.0}).owner, ElementsAre(0, 1, 0, 1));
}

TEST(ContextCut, PartsAreExchangedWhereThatLowersTheLargestLoad) {
  // Dealt: 9, 5, 1 and 7, 6, 4, of 15 and 17; 6 for 5 makes both 16.
  EXPECT_THAT(by_work(6, 2, std::vector{4.0, 9.0, 5.0, 1.0, 6.0, 7.0}).owner,
              ElementsAre(1, 0, 1, 0, 0, 1));
}

TEST(ContextCut, ARankWithoutRoomGetsNoMore) {
  EXPECT_THAT(by_work(4, 2, std::vector{100.0, 1.0, 2.0, 3.0}).owner, ElementsAre(0, 0, 1, 1));
}

TEST(ContextCut, EqualWorkIsDealtByNumber) {
  EXPECT_THAT(by_work(6, 3, std::vector<double>(6, 2.0)).owner, ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(by_work(4, 2, std::vector<double>(4, 0.0)).owner, ElementsAre(0, 0, 1, 1));
}

TEST(ContextCut, RowsWithoutPositionsAreCut) {
  const ContextCut cut = head_tail(0, 2, 4);
  EXPECT_THAT(cut.places_of(1), IsEmpty());
  EXPECT_EQ(cut.positions_of_rank(), 0);
}

TEST(ContextCut, TextAndHashSayAll) {
  const ContextCut cut = head_tail(512, 2, 4);
  EXPECT_EQ(to_string(cut), "4 parts of 128 over 2 ranks: 0 1 1 0");
  EXPECT_EQ(to_string(head_tail(3, 1, 1)), "1 part of 3 over 1 rank: 0");
  EXPECT_EQ(hash(cut), hash(head_tail(512, 2, 4)));
  EXPECT_NE(hash(cut), hash(head_tail(516, 2, 4)));
  EXPECT_NE(hash(head_tail(8, 1, 2)), hash(head_tail(8, 1, 4)));
}

TEST(ContextCut, LengthsThatPartsDoNotDivideAreRefusedWithTheNearest) {
  const auto refused = [](std::int64_t positions, int ranks, int parts) {
    return error_of(ErrorKind::kConfig, [&] { check_cut(positions, ranks, parts); });
  };
  EXPECT_EQ(refused(1030, 2, 4),
            "context parallelism: found rows of 1030 positions, expected a multiple of 4, the "
            "parts that 2 ranks share (parallelism.context_parallel_parts); take 1028 or 1032");
  EXPECT_THAT(refused(3, 4, 8), EndsWith("; take 8"));
  EXPECT_THAT(refused(15, 4, 8), EndsWith("; take 8 or 16"));
}

TEST(ContextCut, WorkThatIsNoAmountIsRefused) {
  for (const double wrong : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { by_work(8, 2, std::vector{1.0, wrong}); }),
                Says("of part 1, expected a finite amount that is not negative"));
  }
}

TEST(ContextCut, PartsThatRanksDoNotDivideAreRefused) {
  const auto refused = [](const std::function<void()>& action) {
    return error_of(ErrorKind::kConfig, action);
  };
  const std::string many =
      "a cut of rows: found 6 parts, expected a multiple of the 4 ranks of "
      "parallelism.context_parallel_degree";
  EXPECT_EQ(refused([] { check_cut(48, 4, 6); }), many);
  EXPECT_EQ(refused([] { head_tail(48, 4, 6); }), many);
  EXPECT_EQ(refused([] { by_work(48, 4, std::vector<double>(6, 1.0)); }), many);
  EXPECT_THAT(refused([] { check_cut(48, 4, 0); }), Says("found 0 parts"));
  EXPECT_THAT(refused([] { by_work(48, 4, {}); }), Says("found 0 parts"));
  EXPECT_EQ(
      refused([] { head_tail(48, 4, 12); }),
      "parallelism.context_parallel_parts: found 12, expected a multiple of 8, a head and a tail "
      "of a row for each of context_parallel_degree = 4 ranks; change it, or leave it out");
}

}  // namespace
}  // namespace tessera::layout::context_cut_test
