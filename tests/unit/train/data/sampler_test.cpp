#include "train/data/sampler.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <numeric>

#include "support/temporary_folder.h"
#include "train/data/document_rows.h"
#include "train/data/source_draw.h"

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

// The draw of several sources, over random weights.

/// Each is at least two millionths of their sum, as the configuration requires (train/config).
std::vector<double> drawn_weights() {
  const auto sources = *rc::gen::inRange(1, 9);
  std::vector<double> weights;
  for (int i = 0; i < sources; ++i) {
    weights.push_back(std::exp2(*rc::gen::inRange(-8, 8)) * *rc::gen::inRange(1, 1000));
  }
  const double least = 2.1e-6 * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight = std::max(weight, least);
  return weights;
}

std::uint64_t drawn_seed() { return *rc::gen::arbitrary<std::uint32_t>(); }

/// Not one of the first only.
std::int64_t drawn_position() {
  return *rc::gen::inRange<std::int64_t>(0, 3'000) +
         *rc::gen::element<std::int64_t>(0, 0, SourceDraw::kUnits - 1'000, 7'777'777'777);
}

RC_GTEST_PROP(SourceDraw, RowsOfEachSourceComeOneAfterTheOther, ()) {
  const SourceDraw draw(drawn_seed(), drawn_weights());
  const auto begin = drawn_position();
  auto next = draw.counts(begin);
  RC_ASSERT(std::accumulate(next.begin(), next.end(), std::int64_t{0}) == begin);
  for (const SourceDraw::Row& row : draw.rows(begin, begin + 700)) {
    RC_ASSERT(row.number == next.at(row.source));
    ++next[row.source];
  }
  RC_ASSERT(next == draw.counts(begin + 700));
}

RC_GTEST_PROP(SourceDraw, PartsAreThoseOfTheWhole, ()) {
  // So that a step has the same rows on any number of ranks and after any resumption.
  const auto seed = drawn_seed();
  const auto weights = drawn_weights();
  const SourceDraw draw(seed, weights);
  const auto begin = drawn_position();
  const auto whole = draw.rows(begin, begin + 300);
  const auto from = *rc::gen::inRange(0, 300);
  const auto to = *rc::gen::inRange(from, 301);
  const auto part = SourceDraw(seed, weights).rows(begin + from, begin + to);
  RC_ASSERT(part == std::vector(whole.begin() + from, whole.begin() + to));
}

RC_GTEST_PROP(SourceDraw, SharesAreKeptInEachBlockAndExactInTheEnd, ()) {
  const auto weights = drawn_weights();
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const SourceDraw draw(drawn_seed(), weights);
  const std::int64_t block = drawn_position() / SourceDraw::kBlock;
  const auto before = draw.counts(block * SourceDraw::kBlock);
  const auto after = draw.counts((block + 1) * SourceDraw::kBlock);
  const auto all = draw.counts(5 * SourceDraw::kUnits);
  for (std::size_t k = 0; k < weights.size(); ++k) {
    const double units = draw.share(k) * SourceDraw::kUnits;
    RC_ASSERT(std::abs(units - weights[k] / sum * SourceDraw::kUnits) <= 1.0);
    const double expected = draw.share(k) * SourceDraw::kBlock;
    const auto found = static_cast<double>(after[k] - before[k]);
    RC_ASSERT(found >= std::floor(expected) && found <= std::ceil(expected));
    RC_ASSERT(static_cast<double>(all[k]) == 5 * units);
  }
}

TEST(SourceDraw, AnotherSeedIsAnotherOrderOfTheSameShares) {
  const SourceDraw one(1, {1.0, 1.0});
  const SourceDraw other(2, {1.0, 1.0});
  EXPECT_NE(one.rows(0, 256), other.rows(0, 256));
  EXPECT_NE(one.rows(0, 256), one.rows(256, 512));
  EXPECT_EQ(one.counts(256), (std::vector<std::int64_t>{128, 128}));
  EXPECT_EQ(other.counts(256), one.counts(256));
}

// The packing of documents, over random lengths.

struct Documents {
  std::vector<std::int64_t> ends;
  std::int64_t row_tokens = 1;
};

Documents drawn_documents() {
  Documents drawn;
  drawn.row_tokens = *rc::gen::inRange<std::int64_t>(1, 70);
  const auto count = *rc::gen::inRange(1, 400);
  const auto longest = *rc::gen::element<std::int64_t>(3, drawn.row_tokens + 1, 200);
  std::int64_t end = 0;
  for (int i = 0; i < count; ++i) {
    drawn.ends.push_back(end += *rc::gen::inRange<std::int64_t>(1, longest + 1));
  }
  return drawn;
}

/// The pieces of all rows, in the order of the data.
std::vector<DocumentPiece> pieces_of(const DocumentRows& rows) {
  std::vector<DocumentPiece> pieces;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    pieces.insert(pieces.end(), rows.row(i).begin(), rows.row(i).end());
  }
  std::ranges::sort(pieces, {}, &DocumentPiece::begin);
  return pieces;
}

RC_GTEST_PROP(DocumentRows, EveryDocumentIsThereOnceAndWholeUnlessItIsLongerThanARow, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows rows(ends, row_tokens);
  std::vector<DocumentPiece> expected;
  std::int64_t begin = 0;
  std::int64_t longer = 0;
  for (const std::int64_t end : ends) {
    longer += end - begin > row_tokens ? 1 : 0;
    for (; end - begin > row_tokens; begin += row_tokens) expected.push_back({begin, row_tokens});
    expected.push_back({begin, end - begin});
    begin = end;
  }
  RC_ASSERT(pieces_of(rows) == expected);
  RC_ASSERT(rows.cut_documents() == longer);
}

RC_GTEST_PROP(DocumentRows, RowsHoldWhatTheyCanAndAllButOneAreMoreThanHalfFull, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows rows(ends, row_tokens);
  std::int64_t half_empty = 0;
  std::int64_t held = 0;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    std::int64_t tokens = 0;
    std::int64_t before = -1;
    for (const DocumentPiece& piece : rows.row(i)) {
      RC_ASSERT(piece.begin > before);
      before = piece.begin;
      tokens += piece.count;
    }
    RC_ASSERT(tokens >= 1 && tokens <= row_tokens);
    half_empty += 2 * tokens <= row_tokens ? 1 : 0;
    held += tokens;
  }
  RC_ASSERT(half_empty <= 1);
  RC_ASSERT(held == ends.back());
  RC_ASSERT(rows.empty_places() == rows.rows() * row_tokens - held);
}

RC_GTEST_PROP(DocumentRows, TheSameDocumentsMakeTheSameRows, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows one(ends, row_tokens);
  const DocumentRows other(ends, row_tokens);
  RC_ASSERT(one.rows() == other.rows());
  for (std::int64_t i = 0; i < one.rows(); ++i) {
    RC_ASSERT(std::ranges::equal(one.row(i), other.row(i)));
  }
}

TEST(DocumentRows, ADocumentGoesWhereTheLeastRoomIsLeft) {
  // 6 and 5 open a row each; 3 goes next to 6, where 1 is left, 4 next to 5.
  const std::vector<std::int64_t> ends{6, 11, 14, 18};
  const DocumentRows rows(ends, 10);
  ASSERT_EQ(rows.rows(), 2);
  EXPECT_THAT(rows.row(0), ElementsAre(DocumentPiece{0, 6}, DocumentPiece{11, 3}));
  EXPECT_THAT(rows.row(1), ElementsAre(DocumentPiece{6, 5}, DocumentPiece{14, 4}));
  EXPECT_EQ(rows.empty_places(), 2);
}

TEST(DocumentEnds, AreReadAndHaveToRiseToTheNumberOfTokens) {
  const TemporaryFolder folder;
  const auto write = [&](const std::vector<std::int64_t>& ends) {
    return folder.write("a.docs.bin",
                        {reinterpret_cast<const char*>(ends.data()), ends.size() * 8});
  };
  EXPECT_THAT(read_document_ends(write({3, 4, 9}), 9), ElementsAre(3, 4, 9));
  const auto refusal = [&](const std::filesystem::path& path) {
    return error_of(ErrorKind::kFormat, [&] { read_document_ends(path, 9); });
  };
  EXPECT_THAT(refusal(write({3, 3, 9})), Says("found the end 3 of document 1 after 3"));
  EXPECT_THAT(refusal(write({0, 9})), Says("the end 0 of document 0"));
  EXPECT_THAT(refusal(write({3, 10})), Says("up to the 9 tokens"));
  EXPECT_THAT(refusal(write({3, -1})), Says("found the end 18446744073709551615 of document 1"));
  EXPECT_THAT(refusal(write({3, 8})), Says("the last document's end 8, expected 9"));
  EXPECT_THAT(refusal(folder.write("a.docs.bin", "1234567")), Says("found 7 bytes"));
  EXPECT_THAT(refusal(folder.write("a.docs.bin", "")), Says("found no document for 9 tokens"));
}

}  // namespace
}  // namespace tessera::train::sampler_test
