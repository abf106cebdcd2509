// Counts, and the bias that needs no auxiliary loss.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moe/routing.h"

namespace tessera::moe::load_balance_test {
namespace {

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
}  // namespace tessera::moe::load_balance_test
