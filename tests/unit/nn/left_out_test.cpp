// Parameters behind a result that the backward leaves out have no gradient, as with at::linear.
#include "unit/nn/left_out.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "nn/embedding.h"
#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

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

/// Returns the gradients of x, residual and the norm's weight.
Tensors gradients_of_add_rms_norm(const Tensors& inputs, bool uses_sum, bool uses_normed) {
  const Tensors leaves = leaves_of(inputs);
  const auto [sum, normed] = add_rms_norm(leaves[0], leaves[1], leaves[2], kEps);
  if (uses_sum) {
    (uses_normed ? sum.square().sum() + normed.pow(3).sum() : sum.square().sum()).backward();
  } else {
    uses_normed ? normed.pow(3).sum().backward() : backward_around(sum + normed);
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

// Layers in fp64 can be differentiated twice, as the ATen operations that they are made of.

struct Layer {
  std::string name;
  std::function<at::Tensor(const Tensors&)> run;
  std::vector<std::vector<std::int64_t>> sizes;  ///< of its inputs
};

class SecondDerivative : public ::testing::Test {
 protected:
  at::Tensor draw(at::IntArrayRef sizes) {
    return at::randn(sizes, generator_, at::TensorOptions(at::kDouble));
  }
  Tensors draw_all(const Layer& layer) {
    Tensors all;
    for (const auto& sizes : layer.sizes) all.push_back(draw(sizes));
    return all;
  }

  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>(20261123);
};

Tensors leaves_of(const Tensors& values) {
  Tensors leaves;
  for (const auto& value : values) leaves.push_back(value.detach().clone().requires_grad_(true));
  return leaves;
}

/// Slope of the result, weighted, along `direction` in the inputs, with a graph of its own.
at::Tensor slope(const Layer& layer, const Tensors& inputs, const at::Tensor& weights,
                 const Tensors& direction) {
  const auto y = (layer.run(inputs) * weights).sum();
  const auto grads = torch::autograd::grad({y}, inputs, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true, /*allow_unused=*/true);
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) sum = sum + (grads[i] * direction[i]).sum();
  }
  return sum;
}

std::vector<Layer> layers() {
  const auto targets = at::tensor({1, 4, -100, 0, 2, 6}, at::kLong).view({2, 3});
  const auto ids = at::tensor({1, 0, 5, 1, 1, 3}, at::kLong).view({2, 3});
  const auto table = [](std::int64_t positions) {
    return Rope({}, 4).table(positions, at::kDouble, at::kCPU);
  };
  return {
      {"norm", [](const Tensors& in) { return rms_norm(in[0], in[1], 1e-6); }, {{3, 8}, {8}}},
      {"norm of a view",
       [](const Tensors& in) { return rms_norm(in[0].t(), in[1], 1e-6); },
       {{8, 3}, {8}}},
      {"sum and norm",
       [](const Tensors& in) {
         const auto [sum, y] = add_rms_norm(in[0], in[0].cos() * in[1], in[2], 1e-6);
         return sum * y;
       },
       {{3, 8}, {3, 8}, {8}}},
      {"rope",
       [&](const Tensors& in) { return rope_heads(in[0].sin(), {.heads = 2}, {}, table(3)); },
       {{2, 3, 8}}},
      {"rope with a norm",
       [&](const Tensors& in) { return rope_heads(in[0], {.heads = 2}, {in[1], 1e-6}, table(3)); },
       {{2, 3, 8}, {4}}},
      {"swiglu", [](const Tensors& in) { return swiglu(in[0], in[1]); }, {{3, 5}, {3, 5}}},
      {"swiglu of halves", [](const Tensors& in) { return swiglu_halves(in[0]); }, {{3, 10}}},
      {"attention",
       [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.5); },
       {{1, 2, 3, 2, 4}, {1, 2, 3, 1, 4}, {1, 3, 8}}},
      {"embedding", [=](const Tensors& in) { return nn::embedding(ids, in[0].sin()); }, {{6, 4}}},
      {"loss",
       [=](const Tensors& in) { return cross_entropy_sum(in[0], targets, Logits::kKeep); },
       {{2, 3, 7}}},
      {"loss over its logits",
       [=](const Tensors& in) { return cross_entropy_sum(in[0] * 1.0, targets, Logits::kConsume); },
       {{2, 3, 7}}},
  };
}

TEST_F(SecondDerivative, IsThatOfDifferencesOfTheFirst) {
  for (const auto& layer : layers()) {
    SCOPED_TRACE(layer.name);
    const auto values = draw_all(layer);
    const auto along = draw_all(layer), across = draw_all(layer);
    const auto weights = draw(layer.run(values).sizes());
    const auto inputs = leaves_of(values);
    const auto second = torch::autograd::grad({slope(layer, inputs, weights, along)}, inputs, {},
                                              std::nullopt, false, /*allow_unused=*/true);
    double found = 0;
    for (std::size_t i = 0; i < second.size(); ++i) {
      if (second[i].defined()) found += (second[i] * across[i]).sum().item<double>();
    }
    constexpr double kStep = 1e-5;
    const auto slope_at = [&](double step) {
      Tensors moved;
      for (std::size_t i = 0; i < values.size(); ++i) moved.push_back(values[i] + across[i] * step);
      return slope(layer, leaves_of(moved), weights, along).item<double>();
    };
    const double expected = (slope_at(kStep) - slope_at(-kStep)) / (2 * kStep);
    // Rounding of the slopes over the step is 2^-53 x 1e2 / 1e-5, the third derivative times the
    // step squared 1e-8.
    EXPECT_NEAR(found, expected, 1e-6 * (1 + std::abs(expected)));
    EXPECT_GT(std::abs(expected), 1e-3) << "a case that shows nothing";
  }
}

// Dtypes without a kernel: results and gradients have the bits of ATen's operations under autograd,
// for all derivatives, ATen's or our own.

class CompositeBits : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(11); }
  static at::Tensor draw(at::IntArrayRef sizes) { return at::randn(sizes).to(GetParam()); }

  static void expect_same(const Function& ours, const Function& composite, const Tensors& inputs) {
    const at::Tensor grad = at::randn(composite(inputs).sizes());
    const Tensors found = run(ours, inputs, grad), expected = run(composite, inputs, grad);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type()) << "result " << i;
      EXPECT_TRUE(at::equal(found[i], expected[i]))
          << "result " << i << ", largest difference "
          << (found[i] - expected[i]).abs().max().item<double>();
    }
  }
};

TEST_P(CompositeBits, OfNorms) {
  for (const auto rounding : {NormRounding::kBeforeWeight, NormRounding::kOnce}) {
    expect_same([&](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5, rounding); },
                [&](const Tensors& in) { return rms_norm_composite(in[0], in[1], 1e-5, rounding); },
                {draw({3, 7, 33}), draw({33})});
    expect_same(
        [&](const Tensors& in) {
          const SumAndNorm both = add_rms_norm(in[0], in[1], in[2], 1e-5, rounding);
          return at::cat({both.sum, both.normed}, 0);
        },
        [&](const Tensors& in) {
          const at::Tensor sum = in[0] + in[1];
          return at::cat({sum, rms_norm_composite(sum, in[2], 1e-5, rounding)}, 0);
        },
        {draw({3, 7, 33}), draw({3, 7, 33}), draw({33})});
  }
}

TEST_P(CompositeBits, OfRope) {
  Rope rope({}, 16);
  const RopeTable table = rope.table(5, GetParam(), at::kCPU);
  const HeadLayout layout{.heads = 4, .repeat = 2};
  expect_same([&](const Tensors& in) { return rope_heads(in[0], layout, {}, table); },
              [&](const Tensors& in) { return rope_heads_composite(in[0], layout, {}, table); },
              {draw({2, 5, 64})});
  expect_same(
      [&](const Tensors& in) { return rope_heads(in[0], layout, {in[1], 1e-6}, table); },
      [&](const Tensors& in) { return rope_heads_composite(in[0], layout, {in[1], 1e-6}, table); },
      {draw({2, 5, 64}), draw({16})});
}

TEST_P(CompositeBits, OfGates) {
  expect_same([](const Tensors& in) { return swiglu(in[0], in[1]); },
              [](const Tensors& in) { return swiglu_composite(in[0], in[1]); },
              {draw({5, 33}), draw({5, 33})});
  expect_same([](const Tensors& in) { return swiglu_halves(in[0]); },
              [](const Tensors& in) {
                return swiglu_composite(in[0].narrow(1, 0, 17), in[0].narrow(1, 17, 17));
              },
              {draw({5, 34})});
}

TEST_P(CompositeBits, OfCausalAttention) {
  for (const std::int64_t positions : {1, 8, 40}) {
    expect_same(
        [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.4); },
        [](const Tensors& in) { return causal_attention_composite(in[0], in[1], in[2], 0.4); },
        {draw({2, 2, positions, 3, 8}), draw({2, 2, positions, 1, 8}),
         draw({2, positions, 2 * 6})});
  }
}

TEST_P(CompositeBits, OfEmbeddings) {
  const at::Tensor ids = at::tensor({3, 1, 4, 1, 5, 2, 6, 5}, at::kLong).view({2, 4});
  for (const std::optional<std::int64_t> padding : {std::optional<std::int64_t>(), {1}}) {
    expect_same([&](const Tensors& in) { return embedding(ids, in[0], padding); },
                [&](const Tensors& in) { return embedding_composite(ids, in[0], padding); },
                {draw({7, 9})});
  }
}

TEST_P(CompositeBits, OfTheLoss) {
  const at::Tensor targets = at::tensor({3, -100, 0, 10, 9, -100}, at::kLong).view({2, 3});
  expect_same([&](const Tensors& in) { return cross_entropy_sum(in[0], targets); },
              [&](const Tensors& in) { return cross_entropy_sum_composite(in[0], targets); },
              {draw({2, 3, 11})});
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CompositeBits, testing::Values(at::kDouble, at::kHalf),
                         [](const auto& one) { return std::string(c10::toString(one.param)); });

}  // namespace
}  // namespace tessera::nn::left_out_test
