// Counts, the auxiliary loss as transformers writes it, and the bias without one.
#include "moe/load_balance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::moe {
namespace {

at::Tensor choice() { return at::tensor({0, 1, 1, 3, 0, 1, 1, 3}, at::kLong).view({4, 2}); }

TEST(LoadBalance, CountsLeaveOutPaddingAndKeepExpertsWithoutTokens) {
  EXPECT_TRUE(count_load(choice(), 5).equal(at::tensor({2, 4, 0, 2, 0}, at::kLong)));
  const at::Tensor counted = at::tensor({1, 1, 0, 0}, at::kLong).to(at::kBool);
  EXPECT_TRUE(count_load(choice(), 5, counted).equal(at::tensor({1, 2, 0, 1, 0}, at::kLong)));
  EXPECT_TRUE(count_load(at::empty({0, 2}, at::kLong), 3).equal(at::zeros({3}, at::kLong)));
}

TEST(LoadBalance, AddendsOfRanksSumToTheLossOfAllTheirRows) {
  at::manual_seed(29);
  const at::Tensor probabilities = at::softmax(at::randn({4, 5}, at::kDouble), 1);
  // transformers: E * sum_e mean_over_rows(chosen) * mean_over_rows(probability)
  const at::Tensor chosen = at::one_hot(choice(), 5).sum(1).to(at::kDouble).mean(0);
  const at::Tensor expected = 0.5 * 5 * (chosen * probabilities.mean(0)).sum();
  const at::Tensor counts = count_load(choice(), 5);
  const AuxiliaryLoss options{0.5, 4};
  const at::Tensor sum = auxiliary_addend(probabilities.narrow(0, 0, 1).sum(0), counts, options) +
                         auxiliary_addend(probabilities.narrow(0, 1, 3).sum(0), counts, options);
  EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-14);
  EXPECT_EQ(auxiliary_addend(at::zeros({5}), at::zeros({5}, at::kLong), {0.5, 0}).item<double>(),
            0.0);
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
}  // namespace tessera::moe
