#include "nn/parameter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/rms_norm.h"
#include "tessera/error.h"

namespace tessera::nn::parameter_test {
namespace {

template <class Use>
std::string message_of(const Use& use) {
  try {
    use();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Parameter, EmptyHasSizesButNoBytes) {
  const at::Tensor parameter = empty_parameter({3, 4});
  EXPECT_EQ(parameter.sizes(), (at::IntArrayRef{3, 4}));
  EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
  EXPECT_EQ(parameter.storage().nbytes(), 0u);
  EXPECT_FALSE(has_data(parameter));
}

TEST(Parameter, EveryLayerSaysThatItHasNoData) {
  const at::Tensor x = at::ones({2, 4});
  Linear linear(4, 3);
  RmsNorm norm(4, 1e-6);
  Embedding embedding(5, 4);
  const char* expected = "parameter has no data yet";
  EXPECT_NE(message_of([&] { linear.forward(x); }).find(expected), std::string::npos);
  EXPECT_NE(message_of([&] { norm.forward(x); }).find(expected), std::string::npos);
  EXPECT_NE(message_of([&] { embedding.forward(at::zeros({1}, at::kLong)); }).find(expected),
            std::string::npos);
}

TEST(Parameter, MaterializeGivesZerosAndKeepsTheTensors) {
  Linear linear(4, 3, Bias::kYes);
  const at::Tensor before = linear.weight;
  materialize(linear);
  EXPECT_TRUE(before.is_same(linear.weight));
  EXPECT_EQ(linear.weight.abs().sum().item<double>(), 0.0);
  {
    at::NoGradGuard guard;
    linear.weight.fill_(2);
  }
  materialize(linear);  // what has data keeps it
  EXPECT_EQ(linear.weight.sum().item<double>(), 24.0);
}

TEST(Parameter, TiedLeavesShareMemoryAndHaveTheirOwnGradients) {
  const at::Tensor owner = empty_parameter({2, 2});
  const at::Tensor alias = empty_parameter({2, 2});
  tie(alias, owner);
  EXPECT_TRUE(alias.is_alias_of(owner));
  EXPECT_FALSE(alias.is_same(owner));
  torch::nn::Module holder;
  holder.register_parameter("owner", owner);
  materialize(holder);
  EXPECT_TRUE(has_data(alias));
  (alias * 2 + owner * 3).sum().backward();
  EXPECT_EQ(alias.grad()[0][0].item<double>(), 2.0);
  EXPECT_EQ(owner.grad()[0][0].item<double>(), 3.0);
}

TEST(Parameter, TyingDifferentShapesIsRefused) {
  EXPECT_THROW(tie(empty_parameter({2, 3}), empty_parameter({3, 2})), Error);
}

}  // namespace
}  // namespace tessera::nn::parameter_test
