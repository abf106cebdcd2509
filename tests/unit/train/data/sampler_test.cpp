#include "train/data/sampler.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <set>

namespace tessera::train::sampler_test {
namespace {

using Ranges = std::vector<RowRange>;

TEST(ContiguousBlock, SevenOnThreeIsThreeTwoTwo) {
  EXPECT_EQ(layout::part_of(7, 3, 0), (RowRange{0, 3}));
  EXPECT_EQ(layout::part_of(7, 3, 1), (RowRange{3, 5}));
  EXPECT_EQ(layout::part_of(7, 3, 2), (RowRange{5, 7}));
  EXPECT_EQ(layout::part_of(2, 4, 3), (RowRange{2, 2}));
}

TEST(MicroBatches, EveryRankRunsTheLargestNumber) {
  EXPECT_EQ(micro_batches(7, 2, 3, 0), (Ranges{{0, 2}, {2, 3}}));
  EXPECT_EQ(micro_batches(7, 2, 3, 1), (Ranges{{3, 5}, {5, 5}}));
  EXPECT_EQ(micro_batches(2, 8, 4, 3), (Ranges{{2, 2}}));
  EXPECT_EQ(micro_batches(0, 1, 2, 0), (Ranges{{0, 0}}));
}

TEST(MicroBatchesByCount, CutTheRowsOfARankAndAreEmptyWhereThereAreFewer) {
  EXPECT_EQ(micro_batches_by_count(7, 2, 2, 0), (Ranges{{0, 2}, {2, 4}}));
  EXPECT_EQ(micro_batches_by_count(7, 2, 2, 1), (Ranges{{4, 6}, {6, 7}}));
  EXPECT_EQ(micro_batches_by_count(2, 3, 1, 0), (Ranges{{0, 1}, {1, 2}, {2, 2}}));
  EXPECT_EQ(micro_batches_by_count(1, 2, 2, 1), (Ranges{{1, 1}, {1, 1}}));
}

RC_GTEST_PROP(MicroBatchesByCount, CoverEveryRowOnceInOrderInAsManyPiecesOnEveryRank, ()) {
  const auto rows = *rc::gen::inRange<std::int64_t>(0, 40);
  const auto count = *rc::gen::inRange(1, 12);
  const int ranks = *rc::gen::inRange(1, 9);
  std::int64_t next = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const Ranges mine = micro_batches_by_count(rows, count, ranks, rank);
    RC_ASSERT(std::cmp_equal(mine.size(), count));
    for (const RowRange& range : mine) {
      RC_ASSERT(range.begin == next && range.end >= next);
      RC_ASSERT(mine.front().size() - range.size() <= 1);
      next = range.end;
    }
  }
  RC_ASSERT(next == rows);
}

RC_GTEST_PROP(MicroBatches, CoverEveryRowOnceInOrder, ()) {
  const auto rows = *rc::gen::inRange<std::int64_t>(0, 40);
  const auto local = *rc::gen::inRange<std::int64_t>(1, 9);
  const int ranks = *rc::gen::inRange(1, 9);
  std::int64_t next = 0;
  const std::size_t count = micro_batches(rows, local, ranks, 0).size();
  for (int rank = 0; rank < ranks; ++rank) {
    const Ranges mine = micro_batches(rows, local, ranks, rank);
    RC_ASSERT(mine.size() == count);
    for (const RowRange& range : mine) {
      RC_ASSERT(range.size() >= 0 && range.size() <= local);
      if (range.size() == 0) continue;
      RC_ASSERT(range.begin == next);
      next = range.end;
    }
  }
  RC_ASSERT(next == rows);
}

RC_GTEST_PROP(RowOrder, EveryRowOnceAnEpoch, ()) {
  const auto rows = *rc::gen::inRange<std::int64_t>(1, 60);
  const auto in_step = *rc::gen::inRange<std::int64_t>(1, 17);
  const RowOrder order(*rc::gen::arbitrary<std::uint32_t>(), rows, in_step);
  std::vector<int> seen(static_cast<std::size_t>(rows), 0);
  for (std::int64_t position = 0; position < 3 * rows; ++position) {
    const std::int64_t row = order.data_row(position / in_step + 1, position % in_step);
    RC_ASSERT(row >= 0 && row < rows);
    ++seen[static_cast<std::size_t>(row)];
    if ((position + 1) % rows == 0) {  // an epoch ends here, inside a step or not
      for (const int times : seen) RC_ASSERT(times == (position + 1) / rows);
    }
  }
}

// The rows of a step as all ranks together see them, in order.
std::vector<std::int64_t> rows_of_step(const RowOrder& order, std::int64_t step, std::int64_t local,
                                       int ranks) {
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < ranks; ++rank) {
    for (const RowRange& range : micro_batches(order.rows_in_step(), local, ranks, rank)) {
      for (std::int64_t i = range.begin; i < range.end; ++i)
        rows.push_back(order.data_row(step, i));
    }
  }
  return rows;
}

RC_GTEST_PROP(RowOrder, RowsOfAStepDoNotDependOnRanksOrMicroBatches, ()) {
  const RowOrder order(*rc::gen::arbitrary<std::uint32_t>(),
                       *rc::gen::inRange<std::int64_t>(1, 100), 12);
  const auto step = *rc::gen::inRange<std::int64_t>(1, 50);
  const auto expected = rows_of_step(order, step, 12, 1);
  for (const int ranks : {1, 2, 3, 4, 6, 12}) {
    for (const std::int64_t local : {1, 2, 3}) {
      RC_ASSERT(rows_of_step(order, step, local, ranks) == expected);
    }
  }
}

TEST(RowOrder, DiffersBySeedAndEpoch) {
  const auto epoch = [](const RowOrder& order, std::int64_t step) {
    std::vector<std::int64_t> rows;
    for (std::int64_t i = 0; i < 100; ++i) rows.push_back(order.data_row(step, i));
    return rows;
  };
  const RowOrder one(1, 100, 100);
  const RowOrder two(2, 100, 100);
  EXPECT_NE(epoch(one, 1), epoch(one, 2));
  EXPECT_NE(epoch(one, 1), epoch(two, 1));
  std::vector<std::int64_t> file_order(100);
  std::iota(file_order.begin(), file_order.end(), 0);
  EXPECT_NE(epoch(one, 1), file_order);
}

}  // namespace
}  // namespace tessera::train::sampler_test
