// Rules over what ranks were seen to do: a mistake is named, what is right is not, and a comparison of
// nothing is no agreement.
#include <cmath>
#include <limits>

#include "check/gradient_diff.h"
#include "check/rank_order.h"
#include "check/report.h"
#include "check/seen_transitions.h"
#include "support/test.h"

namespace tessera::check::rules_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Values row(std::vector<double> numbers) {
  return {{static_cast<std::int64_t>(numbers.size())}, std::move(numbers)};
}

TEST(Values, PartsOfNoRankAreNoPlacement) {
  EXPECT_EQ(placement_of({}, row({1, 2})), std::nullopt);
}

TEST(Values, PartsAreReplicatedCutOrAddends) {
  const Values whole = row({1, 2, 3, 4});
  const auto kind = [&](const std::vector<Values>& parts) {
    const auto placement = placement_of(parts, whole);
    return placement ? std::optional(placement->kind) : std::nullopt;
  };
  EXPECT_EQ(kind({whole, whole}), PlacementKind::kReplicate);
  EXPECT_EQ(kind({row({1}), row({2, 3, 4})}), PlacementKind::kShard);
  EXPECT_EQ(kind({row({1, 0, 3, 0}), row({0, 2, 0, 4})}), PlacementKind::kPartial);
  EXPECT_EQ(kind({row({2, 3, 4}), row({1})}), std::nullopt);
  EXPECT_EQ(kind({row({1, 2, 3, std::nan("")}), whole}), std::nullopt);
}

/// An all_reduce of two ranks, whose results are `made`.
std::vector<std::vector<SeenTransition>> reduced(const std::vector<Values>& made) {
  std::vector<std::vector<SeenTransition>> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back({{.kind = "all_reduce",
                      .where = "leave",
                      .unit = "layers.0",
                      .group = "tp of ranks 0,1",
                      .axis = "tp",
                      .ranks = 2,
                      .rank = rank,
                      .given = row({1.0 + rank, 2}),
                      .made = made[static_cast<std::size_t>(rank)]}});
  }
  return ranks;
}

TEST(SeenTransitions, SumsAreComparedOnEveryRank) {
  EXPECT_TRUE(wrong_transitions(reduced({row({3, 4}), row({3, 4})})).empty());
  const auto findings = wrong_transitions(reduced({row({3, 4}), row({6, 8})}));
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].operation, "all_reduce of leave, forward");
  EXPECT_EQ(findings[0].axis, "tp");
  EXPECT_EQ(findings[0].found, "2 times the expected values");
}

NotedRank rank_of(int rank, std::vector<NotedCollective> collectives,
                  std::vector<NotedMessage> messages = {}) {
  return {rank, "", std::move(collectives), std::move(messages)};
}

TEST(RankOrder, RanksOfOneGroupIssueTheSame) {
  const NotedCollective a{"gather of ranks 0,1", 1, "layers.0", "all_gather of layers.0"};
  const NotedCollective b{"gather of ranks 0,1", 2, "layers.1", "all_gather of layers.1"};
  const NotedCollective own{"gather of ranks 0,2", 3, "layers.2", "all_gather of layers.2"};
  EXPECT_TRUE(wrong_order(std::vector{rank_of(0, {a, own, b}), rank_of(1, {a, b})}).empty());
  const auto swapped = wrong_order(std::vector{rank_of(0, {a, b}), rank_of(1, {b, a})});
  ASSERT_EQ(swapped.size(), 1U);
  EXPECT_EQ(swapped[0].unit, "layers.0");
  const auto fewer = wrong_order(std::vector{rank_of(0, {a}), rank_of(1, {a, b})});
  ASSERT_EQ(fewer.size(), 1U);
  EXPECT_EQ(fewer[0].unit, "layers.1");
  EXPECT_THAT(fewer[0].found, HasSubstr("nothing more"));
}

TEST(RankOrder, MessagesHaveTwoEnds) {
  const NotedMessage sent{"activations of stage 1", true, 1, 64};
  NotedMessage received{"activations of stage 1", false, 0, 64};
  EXPECT_TRUE(wrong_order(std::vector{rank_of(0, {}, {sent}), rank_of(1, {}, {received})}).empty());
  received.bytes = 32;
  EXPECT_EQ(wrong_order(std::vector{rank_of(0, {}, {sent}), rank_of(1, {}, {received})}).size(),
            1U);
  EXPECT_EQ(wrong_order(std::vector{rank_of(0, {}, {sent}), rank_of(1, {})}).size(), 1U);
}

TEST(GradientDiff, BitsThenRoundingThenWrong) {
  const auto verdict = [](double b) {
    return compare_gradient("w", row({1}), row({b}), DType::kFloat32).verdict;
  };
  EXPECT_EQ(verdict(1), Verdict::kEqual);
  EXPECT_EQ(verdict(1 + 1e-6), Verdict::kRounding);
  EXPECT_EQ(verdict(2), Verdict::kWrong);
  EXPECT_EQ(verdict(std::numeric_limits<double>::quiet_NaN()), Verdict::kWrong);
  error_of(ErrorKind::kFormat,
           [] { compare_gradient("w", row({1}), row({1, 1}), DType::kFloat32); });
  error_of(ErrorKind::kFormat, [] {
    compare_gradients({{"a", row({1})}}, {{"a", row({1})}, {"b", row({1})}}, DType::kFloat32);
  });
}

TEST(Report, WithoutASteppedRankNothingFits) {
  Report report{.memory = 100, .memory_from = "--device-memory"};
  EXPECT_THAT(to_string(report), Not(HasSubstr("fits")));
  report.places.push_back({.peak = 50});
  EXPECT_THAT(to_string(report), HasSubstr("fits: a rank takes at most 50 B of 100 B"));
  report.knows_tokens = false;
  EXPECT_THAT(to_string(report), HasSubstr("(--device-memory), without activations"));
}

}  // namespace
}  // namespace tessera::check::rules_test
