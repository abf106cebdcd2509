// plan_moves: every wanted element comes once, from a rank that has it, and nothing else moves.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "layout/range.h"
#include "tessera/error.h"

namespace tessera::layout::redistribute_test {
namespace {

std::vector<Range> cut(std::int64_t numel, int ranks, std::mt19937_64& random) {
  std::vector<std::int64_t> ends;
  for (int rank = 0; rank + 1 < ranks; ++rank) {
    ends.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(numel + 1)));
  }
  ends.push_back(numel);
  std::sort(ends.begin(), ends.end());
  std::vector<Range> ranges;
  std::int64_t begin = 0;
  for (const auto end : ends) {
    ranges.push_back(begin == end ? Range{} : Range{begin, end});
    begin = end;
  }
  return ranges;
}

TEST(Redistribute, TheSameLayoutMovesNothingBetweenRanks) {
  const std::vector<Range> same = {{0, 5}, {}, {5, 9}};
  const std::vector<Move> expected = {{{0, 5}, 0, 0}, {{5, 9}, 2, 2}};
  EXPECT_EQ(plan_moves(same, same), expected);
}

TEST(Redistribute, ARankTakesItsOwnElementsFirstAndTheRestFromTheLowestRank) {
  const std::vector<Range> everywhere(3, {0, 10});
  for (const auto& move : plan_moves(everywhere, {{0, 4}, {4, 8}, {8, 10}})) {
    EXPECT_EQ(move.from, move.to);
  }
  const std::vector<Move> expected = {{{0, 4}, 0, 0},  {{4, 10}, 1, 0}, {{0, 4}, 0, 1},
                                      {{4, 10}, 1, 1}, {{0, 4}, 0, 2},  {{4, 10}, 1, 2}};
  EXPECT_EQ(plan_moves({{0, 4}, {4, 10}, {}}, everywhere), expected);
}

TEST(Redistribute, ElementsThatNobodyHoldsAreAnError) {
  EXPECT_THROW(plan_moves({{0, 4}}, {{0, 5}}), Error);
}

TEST(Redistribute, RandomLayoutsAreFilledExactlyOnceFromRanksThatHoldThem) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 8);
    const auto numel = static_cast<std::int64_t>(random() % 40);
    const auto before = cut(numel, ranks, random);
    const auto after = random() % 4 == 0 ? std::vector<Range>(before.size(), {0, numel})
                                         : cut(numel, ranks, random);
    std::vector<std::vector<int>> filled(after.size(),
                                         std::vector<int>(static_cast<std::size_t>(numel), 0));
    for (const auto& move : plan_moves(before, after)) {
      EXPECT_FALSE(move.range.empty());
      EXPECT_EQ(intersect(move.range, before[static_cast<std::size_t>(move.from)]), move.range);
      for (auto i = move.range.begin; i < move.range.end; ++i) {
        ++filled[static_cast<std::size_t>(move.to)][static_cast<std::size_t>(i)];
        if (before[static_cast<std::size_t>(move.to)].begin <= i &&
            i < before[static_cast<std::size_t>(move.to)].end) {
          EXPECT_EQ(move.from, move.to);
        }
      }
    }
    for (std::size_t rank = 0; rank < after.size(); ++rank) {
      for (std::int64_t i = 0; i < numel; ++i) {
        EXPECT_EQ(filled[rank][static_cast<std::size_t>(i)],
                  after[rank].begin <= i && i < after[rank].end ? 1 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::layout::redistribute_test
