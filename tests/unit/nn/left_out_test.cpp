// Parameters behind a result that the backward leaves out have no gradient, as with at::linear.
#include "unit/nn/left_out.h"

#include <map>

#include "nn/attention.h"
#include "nn/embedding.h"
#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "nn/loss.h"
#include "nn/masked_attention.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"

namespace tessera::nn::left_out_test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-5;

class LeftOut : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

struct Case {
  Function function;
  Tensors inputs;
};

std::map<std::string, Case> linear_cases() {
  const at::Tensor x = at::randn({2, 5, 7}), weight = at::randn({9, 7}), bias = at::randn({9});
  const GroupOffsets offsets{0, 4, 4, 9};
  const at::Tensor rows = at::randn({9, 7}), groups = at::randn({3, 8, 7});
  return {
      {"at::linear",
       {[](const Tensors& in) { return at::linear(in[0], in[1], in[2]); }, {x, weight, bias}}},
      {"linear", {[](const Tensors& in) { return nn::linear(in[0], in[1], {}); }, {x, weight}}},
      {"linear with bias",
       {[](const Tensors& in) { return nn::linear(in[0], in[1], in[2]); }, {x, weight, bias}}},
      {"adapter",
       {[](const Tensors& in) {
          return add_adapter(in[0], in[1], in[2], in[3], {.rank = 4, .scale = 0.5});
        },
        {at::randn({2, 5, 9}), x, at::randn({4, 7}), at::randn({9, 4})}}},
      {"grouped_linear",
       {[offsets](const Tensors& in) { return grouped_linear(in[0], {in[1]}, offsets); },
        {rows, groups}}},
      {"grouped_linear with bias",
       {[offsets](const Tensors& in) { return grouped_linear(in[0], {in[1], in[2]}, offsets); },
        {rows, groups, at::randn({3, 8})}}},
  };
}

std::map<std::string, Case> other_cases() {
  const at::Tensor ids = at::randint(0, 11, {2, 6}, at::kLong);
  const at::Tensor q = at::randn({2, 2, 5, 3, 8}), k = at::randn({2, 2, 5, 1, 8});
  const RopeTable table = Rope({}, 8).table(5, at::kFloat, at::kCPU);
  const HeadLayout heads{.heads = 6, .repeat = 3};
  const at::Tensor both = at::randn({3, 8});
  return {
      {"rms_norm",
       {[](const Tensors& in) { return nn::rms_norm(in[0], in[1], kEps); },
        {at::randn({2, 8}), at::ones({8})}}},
      {"embedding",
       {[ids](const Tensors& in) { return nn::embedding(ids, in[0]); }, {at::randn({11, 4})}}},
      {"rope_heads",
       {[heads, table](const Tensors& in) { return rope_heads(in[0], heads, {}, table); },
        {at::randn({2, 5, 48})}}},
      {"rope_heads with norm",
       {[heads, table](const Tensors& in) {
          return rope_heads(in[0], heads, {in[1], kEps}, table);
        },
        {at::randn({2, 5, 48}), at::ones({8})}}},
      {"causal_attention",
       {[](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.3); },
        {q, k, at::randn({2, 5, 16})}}},
      {"windowed_attention",
       {[](const Tensors& in) { return windowed_attention(in[0], in[1], in[2], {3, in[3]}, 0.3); },
        {q, k.squeeze(3), k.squeeze(3), at::randn({6})}}},
      {"swiglu", {[](const Tensors& in) { return swiglu(in[0], in[1]); }, {both, both}}},
      {"swiglu_halves", {[](const Tensors& in) { return swiglu_halves(in[0]); }, {both}}},
      {"clamped_swiglu", {[](const Tensors& in) { return clamped_swiglu(in[0], {}); }, {both}}},
      {"clamped_swiglu without kernels",
       {[](const Tensors& in) { return clamped_swiglu(in[0], {}); }, {both.to(at::kDouble)}}},
      {"soft_cap", {[](const Tensors& in) { return soft_cap(in[0], 2.0); }, {both}}},
      {"cross_entropy_sum",
       {[ids](const Tensors& in) { return cross_entropy_sum(in[0], ids); },
        {at::randn({2, 6, 11})}}},
  };
}

TEST_F(LeftOut, LinearLayersGiveNoGradientAsAtLinear) {
  for (const auto& [name, one] : linear_cases()) expect_left_out(one.function, one.inputs, name);
}

TEST_F(LeftOut, EveryOtherFunctionHandsOnThatThereIsNone) {
  for (const auto& [name, one] : other_cases()) expect_left_out(one.function, one.inputs, name);
}

// Naive: the first function that fills in zeros gives them to all in front of it.
TEST_F(LeftOut, AChainOfLayersGivesNone) {
  const auto layers = [](const Tensors& in) {
    const at::Tensor y = nn::rms_norm(nn::linear(in[0], in[1], {}), in[2], kEps);
    return nn::linear(swiglu(nn::linear(y, in[3], {}), y), in[4], {});
  };
  expect_left_out(
      layers,
      {at::randn({2, 8}), at::randn({8, 8}), at::ones({8}), at::randn({8, 8}), at::randn({4, 8})},
      "chain");
}

// One use is in the loss, the other is not: what the first gives stands alone.
TEST_F(LeftOut, AWeightThatIsUsedTwiceHasTheGradientOfTheUseInTheLoss) {
  const Tensors both = leaves_of({at::randn({2, 7}), at::randn({9, 7})});
  const Tensors one = leaves_of(both);
  const at::Tensor used = nn::linear(both[0], both[1], {});
  TwoResults::apply(used, nn::linear(both[0] * 2, both[1], {}))[0].square().sum().backward();
  nn::linear(one[0], one[1], {}).square().sum().backward();
  for (std::size_t i = 0; i < both.size(); ++i) {
    EXPECT_TRUE(both[i].grad().equal(one[i].grad())) << i;
  }
}

/// Of x, residual and the norm's weight.
Tensors gradients_of_add_rms_norm(const Tensors& inputs, bool uses_sum, bool uses_normed) {
  const Tensors leaves = leaves_of(inputs);
  const auto [sum, normed] = add_rms_norm(leaves[0], leaves[1], leaves[2], kEps);
  if (uses_sum) {
    (uses_normed ? sum.square().sum() + normed.pow(3).sum() : sum.square().sum()).backward();
  } else {
    uses_normed ? normed.pow(3).sum().backward() : backward_beside(sum + normed);
  }
  return {leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

TEST_F(LeftOut, EachOfTheTwoResultsOfAddRmsNorm) {
  const Tensors inputs{at::randn({3, 8}), at::randn({3, 8}), at::randn({8})};
  const at::Tensor added = inputs[0] + inputs[1];

  const Tensors none = gradients_of_add_rms_norm(inputs, false, false);
  for (const at::Tensor& gradient : none) EXPECT_FALSE(gradient.defined());

  const Tensors of_sum = gradients_of_add_rms_norm(inputs, true, false);
  EXPECT_TRUE(of_sum[0].equal(added * 2));
  EXPECT_TRUE(of_sum[1].equal(added * 2));
  EXPECT_FALSE(of_sum[2].defined());

  const Tensors of_normed = gradients_of_add_rms_norm(inputs, false, true);
  const Tensors of_both = gradients_of_add_rms_norm(inputs, true, true);
  expect_close(of_both[0], of_normed[0] + added * 2, kFloat32, "x");
  expect_close(of_both[1], of_normed[1] + added * 2, kFloat32, "residual");
  EXPECT_TRUE(of_both[2].equal(of_normed[2]));
}

}  // namespace
}  // namespace tessera::nn::left_out_test
