#include "moe/routing.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tessera/error.h"

namespace tessera::moe {
namespace {

using ::testing::HasSubstr;

class RoutingTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
};

std::string refusal(const at::Tensor& scores, const at::Tensor& imposed) {
  try {
    route(scores, 2, imposed);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    return error.what();
  }
  return "";
}

TEST_F(RoutingTest, TheBestExpertsInAscendingOrderWithWeightsThatSumToOne) {
  const at::Tensor scores =
      at::tensor({0.0F, 3.0F, 1.0F, 2.0F, 5.0F, 0.0F, 4.0F, 0.0F}).view({2, 4});
  const Routing routing = route(scores, 2, std::nullopt);
  EXPECT_TRUE(routing.indices.equal(at::tensor({1, 3, 0, 2}, at::kLong).view({2, 2})));
  EXPECT_TRUE(at::allclose(routing.weights.sum(1), at::ones({2})));
  EXPECT_TRUE(at::allclose(routing.probabilities, at::softmax(scores, 1)));
  EXPECT_NEAR((routing.weights[0][0] / routing.weights[0][1]).item<double>(), std::exp(1.0), 1e-5);
}

TEST_F(RoutingTest, WeightsAreFloat32OfNarrowScores) {
  const Routing routing = route(at::randn({3, 5}).to(at::kBFloat16), 2, std::nullopt);
  EXPECT_EQ(routing.weights.scalar_type(), at::kFloat);
  EXPECT_EQ(route(at::randn({3, 5}).to(at::kDouble), 2, std::nullopt).weights.scalar_type(),
            at::kDouble);
}

TEST_F(RoutingTest, ImposedExpertsTakeTheModelsProbabilities) {
  const at::Tensor scores = at::randn({2, 4});
  const at::Tensor imposed = at::tensor({3, 0, 1, 2}, at::kLong).view({2, 2});
  const Routing routing = route(scores, 2, imposed);
  EXPECT_TRUE(routing.indices.equal(at::tensor({0, 3, 1, 2}, at::kLong).view({2, 2})));
  const at::Tensor chosen = at::softmax(scores, 1).gather(1, routing.indices);
  EXPECT_TRUE(routing.weights.equal(chosen / chosen.sum(1, true)));
}

TEST_F(RoutingTest, NoTokensAreRouted) {
  const Routing routing = route(at::empty({0, 4}), 2, at::empty({0, 2}, at::kLong));
  EXPECT_EQ(routing.weights.sizes(), (std::vector<std::int64_t>{0, 2}));
}

TEST_F(RoutingTest, ImpossibleImposedExpertsAreRefused) {
  const at::Tensor scores = at::randn({1, 4});
  EXPECT_EQ(refusal(scores, at::tensor({1, 2}, at::kLong).view({1, 2})), "");
  EXPECT_THAT(refusal(scores, at::tensor({1, 4}, at::kLong).view({1, 2})),
              HasSubstr("found expert 4, expected 0 to 3"));
  EXPECT_THAT(refusal(scores, at::tensor({-1, 2}, at::kLong).view({1, 2})),
              HasSubstr("found expert -1"));
  EXPECT_THAT(refusal(scores, at::tensor({2, 2}, at::kLong).view({1, 2})), HasSubstr("twice"));
  EXPECT_THAT(refusal(scores, at::tensor({2}, at::kLong).view({1, 1})), HasSubstr("[1, 1]"));
  EXPECT_THAT(refusal(scores, at::tensor({1, 2}, at::kInt).view({1, 2})), HasSubstr("Int"));
}

}  // namespace
}  // namespace tessera::moe
