// The draw of several sources, over random weights.
#include "train/data/source_draw.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

namespace tessera::train::source_draw_test {
namespace {

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

}  // namespace
}  // namespace tessera::train::source_draw_test
