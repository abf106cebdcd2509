#include "moe/routing.h"

#include <ATen/ATen.h>

#include <cmath>

#include "support/test.h"

namespace tessera::moe::routing_test {
namespace {

const RouteOptions kBestTwo{.experts_per_token = 2, .normalize = true};

class RoutingTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
};

std::string refusal(const at::Tensor& scores, const at::Tensor& imposed) {
  return refusal_of(ErrorKind::kFormat, [&] { route(scores, kBestTwo, imposed); });
}

TEST_F(RoutingTest, TheBestExpertsInAscendingOrderWithWeightsThatSumToOne) {
  const at::Tensor scores =
      at::tensor({0.0F, 3.0F, 1.0F, 2.0F, 5.0F, 0.0F, 4.0F, 0.0F}).view({2, 4});
  const Routing routing = route(scores, kBestTwo);
  EXPECT_TRUE(routing.indices.equal(at::tensor({1, 3, 0, 2}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::allclose(routing.weights.sum(1), at::ones({2})));
  EXPECT_TRUE(at::allclose(routing.probabilities, at::softmax(scores, 1)));
  EXPECT_NEAR((routing.weights[0][0] / routing.weights[0][1]).item<double>(), std::exp(1.0), 1e-5);
}

TEST_F(RoutingTest, WeightsAreFloat32OfNarrowScores) {
  const Routing routing = route(at::randn({3, 5}).to(at::kBFloat16), kBestTwo);
  EXPECT_EQ(routing.weights.scalar_type(), at::kFloat);
  EXPECT_EQ(route(at::randn({3, 5}).to(at::kDouble), kBestTwo).weights.scalar_type(), at::kDouble);
}

TEST_F(RoutingTest, ImposedExpertsTakeTheModelsProbabilities) {
  const at::Tensor scores = at::randn({2, 4});
  const at::Tensor imposed = at::tensor({3, 0, 1, 2}, at::kLong).view({2, 2});
  const Routing routing = route(scores, kBestTwo, imposed);
  EXPECT_TRUE(routing.indices.equal(at::tensor({0, 3, 1, 2}, at::kLong).view({2, 2})));
  const at::Tensor chosen = at::softmax(scores, 1).gather(1, routing.indices);
  EXPECT_TRUE(routing.weights.equal(chosen / chosen.sum(1, true)));
}

TEST_F(RoutingTest, NoTokensAreRouted) {
  const Routing routing = route(at::empty({0, 4}), kBestTwo, at::empty({0, 2}, at::kLong));
  EXPECT_EQ(routing.weights.sizes(), (std::vector<std::int64_t>{0, 2}));
}

// For who brings them to a device, where route() looks at none.
TEST_F(RoutingTest, ImposedExpertsAreCheckedInAnyOrderBeforeTheyAreUploaded) {
  const auto refused = [](const std::vector<std::int64_t>& experts) -> std::string {
    return refusal_of(ErrorKind::kFormat,
                      [&] { check_imposed(at::tensor(experts, at::kLong).view({2, 3}), 5); });
  };
  EXPECT_EQ(refused({4, 0, 2, 1, 2, 3}), "");
  EXPECT_THAT(refused({4, 0, 2, 3, 1, 3}), Says("found an expert twice for one token"));
  EXPECT_THAT(refused({4, 0, 5, 1, 2, 3}), Says("found expert 5, expected 0 to 4"));
  EXPECT_NO_THROW(check_imposed(at::empty({0, 3}, at::kLong), 5));
}

TEST_F(RoutingTest, ImpossibleImposedExpertsAreRefused) {
  const at::Tensor scores = at::randn({1, 4});
  EXPECT_EQ(refusal(scores, at::tensor({1, 2}, at::kLong).view({1, 2})), "");
  EXPECT_THAT(refusal(scores, at::tensor({1, 4}, at::kLong).view({1, 2})),
              Says("found expert 4, expected 0 to 3"));
  EXPECT_THAT(refusal(scores, at::tensor({-1, 2}, at::kLong).view({1, 2})),
              Says("found expert -1"));
  EXPECT_THAT(refusal(scores, at::tensor({2, 2}, at::kLong).view({1, 2})), Says("twice"));
  EXPECT_THAT(refusal(scores, at::tensor({2}, at::kLong).view({1, 1})), Says("[1, 1]"));
  EXPECT_THAT(refusal(scores, at::tensor({1, 2}, at::kInt).view({1, 2})), Says("Int"));
}

TEST_F(RoutingTest, TheChosenScoresAloneMayFormTheSoftmax) {
  const at::Tensor scores = at::randn({6, 5});
  const Routing routing =
      route(scores, {.experts_per_token = 3, .scoring = Scoring::kTopKThenSoftmax});
  const auto best = at::topk(scores, 3, 1);
  EXPECT_TRUE(routing.indices.equal(std::get<0>(at::sort(std::get<1>(best), 1))));
  EXPECT_TRUE(routing.weights.equal(at::softmax(scores.gather(1, routing.indices), 1)));
  EXPECT_TRUE(routing.probabilities.equal(at::softmax(scores, 1)));
}

TEST_F(RoutingTest, WeightsAreProbabilitiesTimesTheFactorUnlessNormalized) {
  const at::Tensor scores = at::randn({6, 5});
  const Routing plain = route(scores, {.experts_per_token = 2});
  EXPECT_TRUE(plain.weights.equal(at::softmax(scores, 1).gather(1, plain.indices)));
  const Routing scaled = route(scores, {.experts_per_token = 2, .scaling_factor = 16.0});
  EXPECT_TRUE(scaled.weights.equal(plain.weights * 16.0));
}

TEST_F(RoutingTest, OnlyTheGroupsWithTheBestExpertsCount) {
  // Groups {0, 1}, {2, 3}, {4, 5}: the first and the last have the best experts; 3 is third best.
  const at::Tensor scores = at::tensor({5.0F, 0.0F, 2.0F, 3.0F, 1.0F, 4.0F}).view({1, 6});
  RouteOptions options{.experts_per_token = 3, .groups = 3, .top_groups = 2};
  EXPECT_TRUE(route(scores, options).indices.equal(at::tensor({0, 4, 5}, at::kLong).view({1, 3})));
  options.top_groups = 3;
  EXPECT_TRUE(route(scores, options).indices.equal(at::tensor({0, 3, 5}, at::kLong).view({1, 3})));
}

TEST_F(RoutingTest, TheBiasOfAnExpertCountsForTheChoiceOnly) {
  const at::Tensor scores = at::tensor({3.0F, 2.0F, 1.0F, 0.0F}).view({1, 4});
  RouteOptions options{.experts_per_token = 2};
  options.expert_bias = at::tensor({0.0F, 0.0F, 0.0F, 1.0F});
  const Routing routing = route(scores, options);
  EXPECT_TRUE(routing.indices.equal(at::tensor({0, 3}, at::kLong).view({1, 2})));
  EXPECT_TRUE(routing.weights.equal(at::softmax(scores, 1).gather(1, routing.indices)));
}

// As the paper writes it (DeepSeek-V3, equations 13 to 16), one token at a time.
TEST_F(RoutingTest, SigmoidsAreChosenWithTheBiasAndWeighedWithout) {
  const at::Tensor scores = at::randn({50, 12}, at::kDouble);
  RouteOptions options{.experts_per_token = 3,
                       .scoring = Scoring::kSigmoid,
                       .normalize = true,
                       .scaling_factor = 2.5,
                       .groups = 4,
                       .top_groups = 2};
  options.expert_bias = at::randn({12}).mul(0.3);
  const Routing routing = route(scores, options);
  for (std::int64_t token = 0; token < 50; ++token) {
    std::vector<double> sigmoid, choice;
    for (std::int64_t e = 0; e < 12; ++e) {
      sigmoid.push_back(1 / (1 + std::exp(-scores[token][e].item<double>())));
      choice.push_back(sigmoid.back() + options.expert_bias[e].item<double>());
    }
    const auto group = [&](std::size_t g) {
      std::vector<double> own(choice.begin() + static_cast<std::ptrdiff_t>(3 * g),
                              choice.begin() + static_cast<std::ptrdiff_t>(3 * g + 3));
      std::ranges::sort(own, std::greater());
      return own[0] + own[1];
    };
    std::vector<std::size_t> groups{0, 1, 2, 3}, experts;
    std::ranges::sort(groups, [&](auto a, auto b) { return group(a) > group(b); });
    for (const std::size_t g : {groups[0], groups[1]}) {
      for (std::size_t e = 3 * g; e < 3 * g + 3; ++e) experts.push_back(e);
    }
    std::ranges::sort(experts, [&](auto a, auto b) { return choice[a] > choice[b]; });
    experts.resize(3);
    std::ranges::sort(experts);
    double sum = 0;
    for (const std::size_t e : experts) sum += sigmoid[e];
    for (std::size_t k = 0; k < 3; ++k) {
      const auto slot = static_cast<std::int64_t>(k);
      ASSERT_EQ(routing.indices[token][slot].item<std::int64_t>(),
                static_cast<std::int64_t>(experts[k]))
          << "token " << token;
      EXPECT_NEAR(routing.weights[token][slot].item<double>(), 2.5 * sigmoid[experts[k]] / sum,
                  1e-12);
    }
  }
  EXPECT_NEAR(routing.probabilities.sum().item<double>(), 50.0, 1e-10);
}

TEST_F(RoutingTest, SigmoidsHideNoScoreThatIsNotFinite) {
  const RouteOptions options{.experts_per_token = 2, .scoring = Scoring::kSigmoid};
  EXPECT_EQ(route(at::zeros({5, 4}), options).finite.item<std::int64_t>(), 1);
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    const at::Tensor scores = at::zeros({5, 4});
    scores[2][3] = bad;
    const Routing routing = route(scores, options);
    EXPECT_REFUSED(kNumeric, check_finite(routing, routing.finite), "(token 2, expert 3");
  }
}

TEST_F(RoutingTest, GradientsReachTheScoresThroughTheWeights) {
  const auto check = [](RouteOptions options) {
    const at::Tensor scores = at::randn({4, 6}, at::kDouble).requires_grad_(true);
    const at::Tensor factors = at::randn({4, options.experts_per_token}, at::kDouble);
    const Routing routing = route(scores, options);
    (routing.weights * factors).sum().backward();
    const double step = 1e-6;
    for (std::int64_t i = 0; i < scores.numel(); ++i) {
      const auto moved = [&](double by) {
        const at::Tensor at = scores.detach().clone();
        at.view({-1})[i] += by;
        return (route(at, options, routing.indices).weights * factors).sum().item<double>();
      };
      EXPECT_NEAR(scores.grad().view({-1})[i].item<double>(),
                  (moved(step) - moved(-step)) / (2 * step), 1e-7);
    }
  };
  check({.experts_per_token = 2, .normalize = true});
  check({.experts_per_token = 2, .scaling_factor = 3.0, .groups = 3, .top_groups = 2});
  check({.experts_per_token = 2, .scoring = Scoring::kTopKThenSoftmax});
  check({.experts_per_token = 3,
         .scoring = Scoring::kSigmoid,
         .normalize = true,
         .scaling_factor = 2.5,
         .groups = 3,
         .top_groups = 2});
}

TEST_F(RoutingTest, ScoresThatAreNotFiniteAreNamed) {
  const at::Tensor scores = at::zeros({5, 4});
  scores[3][1] = std::nan("");
  scores[4][0] = std::nan("");
  const Routing routing = route(scores, kBestTwo);
  EXPECT_EQ(route(at::zeros({5, 4}), kBestTwo).finite.item<std::int64_t>(), 1);
  EXPECT_REFUSED(kNumeric, check_finite(routing, routing.finite), "found 2 of 5 tokens",
                 "(token 3, expert 1: nan)");
}

TEST_F(RoutingTest, NoTokensAreRoutedNowhere) {
  for (const std::int64_t groups : {1, 3}) {
    const Routing routing =
        route(at::zeros({0, 6}), {.experts_per_token = 2, .groups = groups, .top_groups = 1});
    EXPECT_EQ(routing.indices.sizes(), at::IntArrayRef({0, 2})) << groups;
    EXPECT_EQ(routing.weights.sizes(), at::IntArrayRef({0, 2})) << groups;
  }
}

TEST_F(RoutingTest, OptionsThatTheExpertsDoNotFitAreRefused) {
  const auto kind = [](const RouteOptions& options) {
    try {
      route(at::zeros({1, 6}), options);
    } catch (const Error& error) {
      return error.kind();
    }
    return ErrorKind::kInternal;
  };
  EXPECT_EQ(kind({.experts_per_token = 2, .groups = 4}), ErrorKind::kConfig);
  EXPECT_EQ(kind({.experts_per_token = 2, .groups = 2, .top_groups = 3}), ErrorKind::kConfig);
  EXPECT_EQ(kind({.experts_per_token = 4, .groups = 2, .top_groups = 1}), ErrorKind::kConfig);
  EXPECT_EQ(kind({.experts_per_token = 7}), ErrorKind::kConfig);
}

// Counts, and the bias that needs no auxiliary loss.

at::Tensor choice() { return at::tensor({0, 1, 1, 3, 0, 1, 1, 3}, at::kLong).view({4, 2}); }

TEST(LoadBalance, CountsKeepExpertsWithoutTokens) {
  EXPECT_TRUE(count_load(choice(), 5).equal(at::tensor({2, 4, 0, 2, 0}, at::kLong)));
  EXPECT_TRUE(count_load(at::empty({0, 2}, at::kLong), 3).equal(at::zeros({3}, at::kLong)));
}

TEST(LoadBalance, ExpertsBelowTheMeanRiseAndTheSumOfTheBiasStays) {
  const at::Tensor bias = at::tensor({0.5F, 0.0F, -0.5F, 0.0F});
  const at::Tensor found = balanced_bias(bias, at::tensor({1, 1, 1, 9}, at::kLong), 0.25);
  // Changes 0.25 0.25 0.25 -0.25 have mean 0.125.
  EXPECT_TRUE(found.equal(at::tensor({0.625F, 0.125F, -0.375F, -0.375F})));
  EXPECT_TRUE(balanced_bias(bias, at::full({4}, 3, at::kLong), 0.25).equal(bias));
}

TEST(LoadBalance, TheBusiestExpertOverTheMean) {
  EXPECT_EQ(load_max_over_mean(at::tensor({1, 1, 1, 9}, at::kLong)), 3.0);
  EXPECT_EQ(load_max_over_mean(at::zeros({4}, at::kLong)), 1.0);
}

}  // namespace
}  // namespace tessera::moe::routing_test
