// Adapters of frozen linear layers: values, gradients, and what dropout is a function of.
#include "nn/linear.h"
#include "nn/parameter.h"
#include "tessera/recompute.h"
#include "unit/nn/compare.h"

namespace tessera::nn::lora_test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kScale = 1.5;

at::Tensor composite(const Tensors& in) {
  return in[0] + at::matmul(at::matmul(in[1], in[2].t()), in[3].t()) * kScale;
}

class Lora : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(29); }
};

TEST_F(Lora, EqualsTheCompositeInFloat64WithAllGradients) {
  const auto ours = [](const Tensors& in) {
    return add_adapter(in[0], in[1], in[2], in[3], {.rank = 4, .scale = kScale});
  };
  for (const std::int64_t rows : {0, 3}) {
    expect_equals_composite(
        ours, composite,
        {at::randn({rows, 5, 9}), at::randn({rows, 5, 7}), at::randn({4, 7}), at::randn({9, 4})},
        kFloat32, "float");
  }
}

// The product and the sum are fp32 for any dtype of the layer: one rounding, of the result and of
// the gradient that is passed on; the adapter's own gradients have none.
TEST_F(Lora, OnABFloat16LayerIsRoundedOnce) {
  const auto ours = [](const Tensors& in) {
    return add_adapter(in[0], in[1], in[2], in[3], {.rank = 4, .scale = kScale});
  };
  expect_equals_composite(
      ours, composite,
      {at::randn({3, 5, 9}).to(at::kBFloat16), at::randn({3, 5, 7}).to(at::kBFloat16),
       at::randn({4, 7}), at::randn({9, 4})},
      kOneBFloat16Rounding, "bfloat16");
  const at::Tensor x = at::randn({2, 3, 7}).to(at::kBFloat16).requires_grad_(true);
  const at::Tensor a = at::randn({4, 7}).requires_grad_(true);
  const at::Tensor b = at::randn({9, 4}).requires_grad_(true);
  add_adapter(at::randn({2, 3, 9}).to(at::kBFloat16), x, a, b, {.rank = 4}).sum().backward();
  EXPECT_EQ(a.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(b.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
}

TEST_F(Lora, LinearWithAnAdapterLearnsThroughAFrozenWeight) {
  auto layer = std::make_shared<Linear>(7, 9);
  layer->add_adapter({.rank = 4, .scale = 0.5, .layer = "l"});
  materialize(*layer);
  const auto parameters = layer->named_parameters();
  ASSERT_EQ(parameters.size(), 3U);
  EXPECT_EQ(parameters.keys()[1], "lora_A.weight");
  EXPECT_EQ(parameters.keys()[2], "lora_B.weight");
  for (const auto& item : parameters) item.value().data().copy_(at::randn(item.value().sizes()));
  layer->weight.set_requires_grad(false);
  const at::Tensor x = at::randn({2, 3, 7});
  layer->forward(x).square().sum().backward();
  EXPECT_FALSE(layer->weight.grad().defined());

  const at::Tensor a = parameters["lora_A.weight"].detach().to(at::kDouble).requires_grad_(true);
  const at::Tensor b = parameters["lora_B.weight"].detach().to(at::kDouble).requires_grad_(true);
  const at::Tensor wide = x.to(at::kDouble);
  (at::linear(wide, layer->weight.to(at::kDouble)) + at::linear(at::linear(wide, a), b) * 0.5)
      .square()
      .sum()
      .backward();
  expect_close(parameters["lora_A.weight"].grad(), a.grad(), kFloat32, "A");
  expect_close(parameters["lora_B.weight"].grad(), b.grad(), kFloat32, "B");
}

// Rows 2 and 3 of a step drop the same elements whether they come with rows 0 and 1 or alone, and
// other elements in another step, layer or seed.
TEST_F(Lora, DropoutFollowsFromThePlaceInTheGlobalBatch) {
  const LoraOptions options{.rank = 1, .dropout = 0.4, .layer = "layers.0.q_proj"};
  const auto factors = [&](const LoraOptions& of, const SamplePlace& place, std::int64_t rows) {
    return dropout_factors(dropout_draw(of, place), {rows, 6, 10}, at::kFloat);
  };
  const at::Tensor all = factors(options, {7, 3, 0}, 4);
  EXPECT_TRUE(factors(options, {7, 3, 2}, 2).equal(all.narrow(0, 2, 2)));
  EXPECT_TRUE(factors(options, {7, 3, 0}, 4).equal(all));
  EXPECT_FALSE(factors(options, {8, 3, 0}, 4).equal(all));
  EXPECT_FALSE(factors(options, {7, 4, 0}, 4).equal(all));
  LoraOptions other = options;
  other.layer = "layers.1.q_proj";
  EXPECT_FALSE(factors(other, {7, 3, 0}, 4).equal(all));
  EXPECT_FALSE(all.select(0, 0).equal(all.select(0, 1)));
  EXPECT_FALSE(all.select(1, 0).equal(all.select(1, 1)));
  // Columns in blocks of four: a row that ends inside of one is its beginning.
  const at::Tensor narrow =
      dropout_factors(dropout_draw(options, {7, 3, 0}), {4, 6, 7}, at::kFloat);
  EXPECT_TRUE(narrow.equal(all.narrow(2, 0, 7)));
  // A rank with a part of the input drops what the whole one does there, also from inside a block.
  for (const std::int64_t begin : {1, 2, 4, 5, 7}) {
    LoraOptions part = options;
    part.first_column = begin;
    EXPECT_TRUE(dropout_factors(dropout_draw(part, {7, 3, 0}), {4, 6, 3}, at::kFloat)
                    .equal(all.narrow(2, begin, 3)))
        << begin;
  }
}

// A share of 0.4 of 40,000 elements is dropped, within five standard deviations (0.0025), and the
// others are scaled to keep the mean.
TEST_F(Lora, DropoutDropsItsShareAndScalesTheRest) {
  const LoraOptions options{.rank = 1, .dropout = 0.4, .layer = "l"};
  const at::Tensor factors =
      dropout_factors(dropout_draw(options, {7, 3, 0}), {10, 40, 100}, at::kFloat);
  const double dropped = factors.eq(0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(dropped, 0.4, 5 * 0.0025);
  EXPECT_TRUE(
      factors.masked_select(factors.ne(0)).eq(static_cast<float>(1 / 0.6)).all().item<bool>());
}

TEST_F(Lora, DropoutIsTheSameInBackwardAndOnlyWithinAScope) {
  const LoraOptions options{.rank = 4, .scale = kScale, .dropout = 0.3, .layer = "l"};
  const SamplePlace place{7, 3, 5};
  const Tensors in{at::randn({3, 5, 9}), at::randn({3, 5, 7}), at::randn({4, 7}),
                   at::randn({9, 4})};
  const at::Tensor factors = dropout_factors(dropout_draw(options, place), {3, 5, 7}, at::kDouble);
  const auto ours = [&](const Tensors& t) {
    const SampleScope scope(place);  // gone when backward runs
    return add_adapter(t[0], t[1], t[2], t[3], options);
  };
  const auto masked = [&](const Tensors& t) {
    return composite({t[0], t[1] * factors, t[2], t[3]});
  };
  expect_equals_composite(ours, masked, in, kFloat32, "in training");
  const auto outside = [&](const Tensors& t) {
    return add_adapter(t[0], t[1], t[2], t[3], options);
  };
  expect_equals_composite(outside, composite, in, kFloat32, "outside");
}

// The recomputation runs when the thread is at another micro-batch already.
TEST_F(Lora, RecomputationDropsWhatTheFirstForwardDropped) {
  const LoraOptions options{.rank = 4, .dropout = 0.5, .layer = "l"};
  const at::Tensor a = at::randn({4, 7}).requires_grad_(true);
  const at::Tensor b = at::randn({7, 4}).requires_grad_(true);
  const at::Tensor x = at::randn({2, 3, 7}).requires_grad_(true);
  const auto block = [&](const Tensors& in) { return add_adapter(in[0], in[0], a, b, options); };
  const auto gradients = [&](const auto& forward) {
    for (const at::Tensor& each : {a, b, x}) each.mutable_grad() = at::Tensor();
    std::optional<SampleScope> scope(std::in_place, SamplePlace{7, 3, 0});
    const at::Tensor y = forward();
    scope.reset();
    const SampleScope later(SamplePlace{7, 3, 2});
    y.square().sum().backward();
    return Tensors{a.grad().clone(), b.grad().clone(), x.grad().clone()};
  };
  const Tensors plain = gradients([&] { return block({x}); });
  const Tensors again = gradients([&] { return checkpoint(block, {x}); });
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(again[i])) << i;
}

}  // namespace
}  // namespace tessera::nn::lora_test
