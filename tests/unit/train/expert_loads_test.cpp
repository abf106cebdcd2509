// Loads of experts: what a file may say, how they are rounded, and how tokens are dealt out.
#include "train/dry/expert_loads.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "support/test.h"

namespace tessera::train::expert_loads_test {
namespace {

struct Routed {
  std::vector<double> shares;
  std::int64_t tokens = 0, k = 1;
};

/// Shares of very different sizes, zeros among them.
Routed any_routed() {
  Routed routed;
  const auto experts = *rc::gen::inRange<std::int64_t>(1, 40);
  for (std::int64_t e = 0; e < experts; ++e) {
    routed.shares.push_back(*rc::gen::element(0.0, 1e-9, 0.3, 1.0, 1.0, 7.0, 1e9));
  }
  routed.shares[*rc::gen::inRange<std::size_t>(0, routed.shares.size())] = 2.0;
  routed.tokens = *rc::gen::inRange<std::int64_t>(0, 300);
  routed.k = *rc::gen::inRange<std::int64_t>(1, std::min<std::int64_t>(experts, 8) + 1);
  return routed;
}

RC_GTEST_PROP(ExpertLoads, EveryTokenIsCountedAndNoExpertTwiceForOne, ()) {
  const Routed r = any_routed();
  const auto counts = tokens_of_experts(r.shares, r.tokens, r.k);
  RC_ASSERT(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == r.tokens * r.k);
  for (const std::int64_t count : counts) RC_ASSERT(count >= 0 && count <= r.tokens);
}

RC_GTEST_PROP(ExpertLoads, CountsAreSharesRoundedToOneOfBothNeighbours, ()) {
  const Routed r = any_routed();
  const double sum = std::accumulate(r.shares.begin(), r.shares.end(), 0.0);
  const double most = std::ranges::max(r.shares) / sum;
  RC_PRE(most * static_cast<double>(r.k) <= 1.0);
  const auto counts = tokens_of_experts(r.shares, r.tokens, r.k);
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const double exact = r.shares[e] / sum * static_cast<double>(r.tokens * r.k);
    RC_ASSERT(std::abs(static_cast<double>(counts[e]) - exact) < 1.0 + 1e-6);
  }
}

RC_GTEST_PROP(ExpertLoads, DealtTokensHaveTheCountsAndDifferentExperts, ()) {
  const Routed r = any_routed();
  std::vector<std::int64_t> chosen(static_cast<std::size_t>(r.tokens * r.k));
  deal_experts(r.shares, r.k, chosen);
  std::vector<std::int64_t> found(r.shares.size(), 0);
  for (std::int64_t token = 0; token < r.tokens; ++token) {
    const auto first = chosen.begin() + token * r.k;
    RC_ASSERT(std::ssize(std::set<std::int64_t>(first, first + r.k)) == r.k);
    for (std::int64_t k = 0; k < r.k; ++k) ++found.at(static_cast<std::size_t>(first[k]));
  }
  RC_ASSERT(found == tokens_of_experts(r.shares, r.tokens, r.k));
}

TEST(ExpertLoads, OfEqualRemaindersTheLowerExpertsAreRoundedUp) {
  const std::vector<double> even(4, 1.0), uneven{4.0, 2.0, 1.0, 1.0};
  EXPECT_EQ(tokens_of_experts(even, 7, 2), (std::vector<std::int64_t>{4, 4, 3, 3}));
  EXPECT_EQ(tokens_of_experts(uneven, 9, 1), (std::vector<std::int64_t>{5, 2, 1, 1}));
}

// A token meets an expert once.
TEST(ExpertLoads, WhatIsAboveOneOfATokensChoicesGoesToTheOthersByTheirShares) {
  const std::vector<double> one{9.0, 2.0, 1.0, 0.0}, alone{1.0, 0.0, 0.0, 0.0};
  EXPECT_EQ(tokens_of_experts(one, 30, 2), (std::vector<std::int64_t>{30, 20, 10, 0}));
  EXPECT_EQ(tokens_of_experts(one, 30, 3), (std::vector<std::int64_t>{30, 30, 30, 0}));
  EXPECT_EQ(tokens_of_experts(alone, 30, 2), (std::vector<std::int64_t>{30, 10, 10, 10}));
}

TEST(ExpertLoads, EachPartOfTheTokensHasNearlyTheSameShares) {
  const std::vector<double> shares{16.0, 8.0, 4.0, 2.0, 1.0, 1.0};
  constexpr std::int64_t kTokens = 1000, kParts = 4, kEach = 2;
  std::vector<std::int64_t> chosen(kTokens * kEach);
  deal_experts(shares, kEach, chosen);
  const auto counts = tokens_of_experts(shares, kTokens, kEach);
  constexpr std::int64_t kPart = kTokens * kEach / kParts;
  for (std::int64_t part = 0; part < kParts; ++part) {
    const auto first = chosen.begin() + part * kPart;
    for (std::size_t e = 0; e < counts.size(); ++e) {
      const auto found = std::count(first, first + kPart, static_cast<std::int64_t>(e));
      EXPECT_NEAR(static_cast<double>(found), static_cast<double>(counts[e]) / kParts,
                  kTokens / 100)
          << "expert " << e << " in part " << part;
    }
  }
}

const models::RoutedExperts kModel{.experts = 3, .experts_per_token = 1, .layers = {1, 2}};

TEST(ExpertLoads, AFileHasOneListOrOneOfEachLayer) {
  EXPECT_EQ(parse_expert_loads("[1, 2.5, 0]", "f", kModel).layers,
            (std::vector<std::vector<double>>{{1, 2.5, 0}}));
  EXPECT_EQ(parse_expert_loads("[[1, 2, 0], [0, 0, 7]]", "f", kModel).layers,
            (std::vector<std::vector<double>>{{1, 2, 0}, {0, 0, 7}}));
}

TEST(ExpertLoads, AFileThatDoesNotFitIsRefusedWithWhatWasFound) {
  const std::vector<std::pair<const char*, const char*>> wrong{
      {"{}", "f: found {}, expected a list of 3 numbers"},
      {"[]", "f: found [], expected a list of 3 numbers"},
      {"7", "f: found 7, expected a list of 3 numbers"},
      {"[1, 2]", "f: found 2 numbers, expected 3, one an expert"},
      {"[1, 2, true]", "f: found true for expert 2, expected a number"},
      {"[1, 2, -0.5]", "f: found -0.5 for expert 2, expected a share"},
      {"[0, 0, 0]", "f: found 0 for every expert"},
      {"[1, [2], 3]", "f: found [2] for expert 1, expected a number"},
      {"[[1, 2, 3], 4]", "f: list 1: found 4, expected a list of numbers"},
      {"[[1, 2, 3], [1, 2]]", "f: list 1: found 2 numbers, expected 3"},
      {"[[1, 2, 3], [0, 0, 0]]", "f: list 1: found 0 for every expert"},
      {"[[1, 2, 3], [1, 2, 3], [1, 2, 3]]", "f: found 3 lists, expected one for all layers, or 2"},
      {"[1, 2, 1e999]", "f: malformed JSON at byte 12: number overflow"},
      {"[1, 2, NaN]", "f: malformed JSON at byte 8"},
      {"[1, 2, 3] 4", "f: malformed JSON"}};
  for (const auto& [text, message] : wrong) {
    EXPECT_REFUSED(kFormat, parse_expert_loads(text, "f", kModel), message);
  }
  EXPECT_REFUSED(kConfig, parse_expert_loads("[1]", "f", {}), "f: found loads of experts");
  const ExpertLoads infinite{{{1.0, std::numeric_limits<double>::infinity(), 0.0}}};
  EXPECT_REFUSED(kFormat, require_fit(infinite, kModel, "f"), "f: found inf for expert 1");
}

TEST(ExpertLoads, TheBusiestRankHoldsTheBusiestExperts) {
  const MeshShapes mesh(MeshShape::dense(1, 1, 4, 1, 1), MeshShape::sparse(1, 1, 2, 2, 1));
  const ExpertLoads later{{{1, 1, 2, 1}}}, by_layer{{{1, 1, 2, 1}, {9, 1, 1, 1}}};
  EXPECT_EQ(busiest_rank({}, mesh, 0), 0);
  EXPECT_EQ(busiest_rank(later, mesh, 0), mesh.ranks_of(0, {axis::kExpert}).back());
  EXPECT_EQ(busiest_rank(later, mesh, 1), 1);
  EXPECT_EQ(busiest_rank(by_layer, mesh, 0), 0);
}

}  // namespace
}  // namespace tessera::train::expert_loads_test
