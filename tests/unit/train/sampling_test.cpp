// The choice of the next token: greedy, drawn, and what it depends on.
#include "train/sampling.h"

#include <cmath>
#include <limits>

#include "support/test.h"

namespace tessera::train::sampling_test {
namespace {

const std::vector<float> kLogits{0.5F, 2.0F, -1.0F, 2.0F, 1.0F};

TEST(ChooseToken, TemperatureZeroTakesTheMostLikelyAndTheFirstOfEqualOnes) {
  for (const std::int64_t position : {0, 1, 77}) {
    EXPECT_EQ(choose_token(kLogits, {}, position), 1);
    EXPECT_EQ(choose_token(kLogits, {.top_k = 2, .seed = 9}, position), 1);
  }
}

TEST(ChooseToken, ADrawDependsOnSeedAndPositionOnly) {
  std::vector<std::int64_t> first, again, other;
  for (std::int64_t position = 0; position < 200; ++position) {
    first.push_back(choose_token(kLogits, {.temperature = 1.0, .seed = 1}, position));
    other.push_back(choose_token(kLogits, {.temperature = 1.0, .seed = 2}, position));
  }
  for (std::int64_t position = 199; position >= 0; --position) {
    again.push_back(choose_token(kLogits, {.temperature = 1.0, .seed = 1}, position));
  }
  EXPECT_EQ(first, std::vector(again.rbegin(), again.rend()));
  EXPECT_NE(first, other);
}

/// Shares of each token among many draws.
std::vector<double> shares(const Sampling& sampling) {
  constexpr std::int64_t kDraws = 40'000;
  std::vector<double> share(kLogits.size(), 0.0);
  for (std::int64_t position = 0; position < kDraws; ++position) {
    share[static_cast<std::size_t>(choose_token(kLogits, sampling, position))] += 1.0;
  }
  for (double& count : share) count /= kDraws;
  return share;
}

TEST(ChooseToken, SharesAreTheSoftmaxOfLogitsOverTemperature) {
  for (const double temperature : {0.5, 1.0, 3.0}) {
    double sum = 0.0;
    for (const float logit : kLogits) sum += std::exp(double{logit} / temperature);
    const auto share = shares({.temperature = temperature});
    for (std::size_t id = 0; id < kLogits.size(); ++id) {
      // Four standard deviations of 40000 draws are at most 0.01; the draws are fixed by the seed.
      EXPECT_NEAR(share[id], std::exp(double{kLogits[id]} / temperature) / sum, 0.01)
          << temperature << " " << id;
    }
  }
}

TEST(ChooseToken, TopKLeavesTheMostLikelyInTheirProportions) {
  const auto share = shares({.temperature = 1.0, .top_k = 3});
  const double sum = 2 * std::exp(2.0) + std::exp(1.0);
  EXPECT_EQ(share[0], 0.0);
  EXPECT_EQ(share[2], 0.0);
  EXPECT_NEAR(share[1], std::exp(2.0) / sum, 0.01);
  EXPECT_NEAR(share[4], std::exp(1.0) / sum, 0.01);
  // The first of two equal ones is kept.
  EXPECT_EQ(shares({.temperature = 1.0, .top_k = 1})[1], 1.0);
  EXPECT_EQ(shares({.temperature = 1.0, .top_k = 5}), shares({.temperature = 1.0}));
}

struct Kept {
  double temperature;
  std::int64_t top_k;
  double top_p;
  std::set<std::int64_t> ids;
};

// The logits that transformers' TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper
// leave, one after the other.
TEST(ChooseToken, TopPLeavesWhatTransformersLeaves) {
  const std::vector<float> logits{0.5F, 2.0F, -1.0F, 1.9F, 1.0F, 3.0F, -4.0F};
  const std::vector<Kept> table{{1, 0, 0.01, {5}},         {1, 0, 0.5, {5}},
                                {1, 0, 0.52, {1, 5}},      {1, 0, 0.75, {1, 3, 5}},
                                {1, 0, 0.9, {1, 3, 4, 5}}, {1, 0, 0.99, {0, 1, 3, 4, 5}},
                                {0.5, 0, 0.75, {5}},       {1, 0, 0.9999, {0, 1, 2, 3, 4, 5, 6}},
                                {0.5, 0, 0.9, {1, 3, 5}},  {0.5, 0, 0.95, {1, 3, 5}},
                                {2, 0, 0.5, {1, 5}},       {2, 0, 0.6, {1, 3, 5}},
                                {1, 3, 0.9, {1, 3, 5}},    {2, 0, 0.9, {0, 1, 3, 4, 5}},
                                {1, 3, 0.6, {1, 5}},       {1, 2, 0.75, {1, 5}},
                                {2, 4, 0.9, {1, 3, 4, 5}}, {1, 0, 1.0, {0, 1, 2, 3, 4, 5, 6}}};
  for (const Kept& kept : table) {
    std::set<std::int64_t> found;
    // The rarest share is 0.0005: e^-20 that 40000 draws miss it, and the seed is fixed.
    for (std::int64_t position = 0; position < 40'000; ++position) {
      found.insert(choose_token(
          logits,
          {.temperature = kept.temperature, .top_k = kept.top_k, .top_p = kept.top_p, .seed = 3},
          position));
    }
    EXPECT_EQ(found, kept.ids) << kept.temperature << " " << kept.top_k << " " << kept.top_p;
  }
}

TEST(ChooseToken, TopPKeepsProportionsAndTheFirstOfEqualOnes) {
  // Shares of the five: 0.084, 0.379, 0.019, 0.379, 0.139.
  const auto share = shares({.temperature = 1.0, .top_p = 0.8});
  const double sum = 2 * std::exp(2.0) + std::exp(1.0);
  EXPECT_EQ(share[0], 0.0);
  EXPECT_EQ(share[2], 0.0);
  EXPECT_NEAR(share[3], std::exp(2.0) / sum, 0.01);
  EXPECT_NEAR(share[4], std::exp(1.0) / sum, 0.01);
  EXPECT_EQ(shares({.temperature = 1.0, .top_p = 0.3})[1], 1.0);
  EXPECT_EQ(shares({.temperature = 1.0, .top_p = 1.0}), shares({.temperature = 1.0}));
  // Products that underflow leave the most likely one.
  EXPECT_EQ(choose_token(kLogits, {.temperature = 1e-300, .top_p = 5e-324}, 0), 1);
  EXPECT_EQ(choose_token(kLogits, {.top_p = 0.1}, 0), 1) << "greedy all the same";
}

TEST(ChooseToken, ATinyTemperatureIsNearlyGreedyAndAHugeOneNearlyUniform) {
  const auto cold = shares({.temperature = 1e-300, .top_k = 1});
  EXPECT_EQ(cold[1], 1.0);
  for (const double share : shares({.temperature = 1e6})) EXPECT_NEAR(share, 0.2, 0.01);
}

TEST(ChooseToken, LogitsThatAreNotFiniteAreAnError) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const double temperature : {0.0, 1.0}) {
      EXPECT_REFUSED(kNumeric,
                     choose_token(std::vector<float>{0.0F, bad}, {.temperature = temperature}, 5),
                     "token 1 at position 5");
    }
  }
}

}  // namespace
}  // namespace tessera::train::sampling_test
