// The layers that only Gemma 4 has, against plain formulas in fp64.
#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "nn/documents.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::gemma_layers_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class GemmaLayers : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(5); }
};

TEST_F(GemmaLayers, PlainNormIsTheNormWithOnes) {
  const auto fused = [](const Tensors& in) { return plain_rms_norm(in[0], 1e-6); };
  const auto composite = [](const Tensors& in) {
    return in[0] * at::rsqrt(in[0].square().mean(-1, true) + 1e-6);
  };
  expect_equals_composite(fused, composite, {at::randn({3, 4, 17})}, kFloat32, "float");
  expect_equals_composite(fused, composite, {at::randn({0, 17})}, kFloat32, "no rows");
  expect_equals_composite(fused, composite, {at::randn({3, 4, 17}).to(at::kBFloat16)},
                          kOneBFloat16Rounding, "bfloat16");
}

TEST_F(GemmaLayers, GemmasNormRoundsOnceAfterTheWeight) {
  const at::Tensor x = at::randn({64}).to(at::kHalf);
  const at::Tensor weight = at::randn({64});
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor exact = (wide * at::rsqrt(wide.square().mean() + 1e-6) * weight).to(at::kHalf);
  EXPECT_TRUE(rms_norm(x, weight, 1e-6, NormRounding::kOnce).equal(exact));
  EXPECT_FALSE(rms_norm(x, weight, 1e-6, NormRounding::kBeforeWeight).equal(exact));
}

TEST_F(GemmaLayers, SoftCapAndItsDerivative) {
  constexpr double kCap = 3.0;
  const auto fused = [](const Tensors& in) { return soft_cap(in[0], kCap); };
  const auto composite = [](const Tensors& in) { return kCap * at::tanh(in[0] / kCap); };
  expect_equals_composite(fused, composite, {at::randn({4, 9}) * 4}, {1e-6, 4e-6}, "float");
  expect_equals_composite(fused, composite, {(at::randn({4, 9}) * 4).to(at::kDouble)},
                          {1e-12, 1e-12}, "double");
}

TEST_F(GemmaLayers, GegluGatesWithTheTanhFormOfGelu) {
  const at::Tensor gate = at::randn({5, 6}, at::kDouble);
  const at::Tensor up = at::randn({5, 6}, at::kDouble);
  const at::Tensor inner = 0.7978845608028654 * (gate + 0.044715 * gate.pow(3));
  EXPECT_TRUE(at::allclose(geglu(gate, up), 0.5 * gate * (1 + inner.tanh()) * up, 1e-12, 1e-12));
}

TEST_F(GemmaLayers, ProportionalRopeTurnsTheFirstPairsWithTheFrequenciesOfTheWholeHead) {
  const at::Tensor whole = inverse_frequencies({.theta = 1e6}, 16);
  RopeOptions options{.theta = 1e6,
                      .type = RopeType::kProportional,
                      .factor = 2.0,
                      .partial_rotary_factor = 3.0 / 8.0};
  const at::Tensor found = inverse_frequencies(options, 16);
  EXPECT_TRUE(found.narrow(0, 0, 3).equal(whole.narrow(0, 0, 3) / 2.0));
  EXPECT_EQ(found.narrow(0, 3, 5).abs().max().item<double>(), 0.0);
  // An element that does not turn passes unchanged, to the bit.
  options.factor = 1.0;
  Rope rope(options, 16);
  const at::Tensor x = at::randn({1, 4, 16});
  const at::Tensor y = rope_heads(x, {.heads = 1}, {}, rope.table(4, at::kFloat, at::kCPU));
  EXPECT_TRUE(y.view({1, 4, 16}).narrow(2, 3, 5).equal(x.narrow(2, 3, 5)));
  EXPECT_TRUE(y.view({1, 4, 16}).narrow(2, 11, 5).equal(x.narrow(2, 11, 5)));
  EXPECT_FALSE(y.view({1, 4, 16}).narrow(2, 0, 3).equal(x.narrow(2, 0, 3)));
}

// A half of a head turns as a whole head of half the size does at the same position.
TEST_F(GemmaLayers, AxialRopeIsTwoRopesSideBySide) {
  constexpr std::int64_t kDim = 16;
  const at::Tensor x = at::randn({1, 5, 2 * kDim});
  at::Tensor positions = at::stack({at::arange(5), at::arange(5).flip(0)}, 1).unsqueeze(0);
  const at::Tensor found =
      axial_rope_heads(x, {.heads = 2}, {}, axial_table(positions, kDim, 100.0, at::kFloat));
  ASSERT_EQ(found.sizes(), (std::vector<std::int64_t>{1, 2, 5, 1, kDim}));
  Rope rope({.theta = 100.0}, kDim / 2);
  const RopeTable table = rope.table(5, at::kFloat, at::kCPU);
  const RopeTable back{table.cos.flip(0), table.sin.flip(0)};
  const at::Tensor halves = x.view({1, 5, 2, 2, kDim / 2});
  const auto half = [&](std::int64_t axis) { return halves.select(3, axis).reshape({1, 5, kDim}); };
  EXPECT_TRUE(at::allclose(found.narrow(4, 0, kDim / 2),
                           rope_heads_composite(half(0), {.heads = 2}, {}, table)));
  EXPECT_TRUE(at::allclose(found.narrow(4, kDim / 2, kDim / 2),
                           rope_heads_composite(half(1), {.heads = 2}, {}, back)));
}

TEST_F(GemmaLayers, AxialRopeHasTheGradientOfItsFormula) {
  const at::Tensor positions = at::randint(0, 4, {2, 3, 2}, at::kLong);
  const auto turn = [&](const Tensors& in) {
    return axial_rope_heads(in[0], {.heads = 4, .repeat = 2}, {in[1], 1e-6, NormRounding::kOnce},
                            axial_table(positions, 8, 100.0, in[0].scalar_type()));
  };
  expect_equals_composite(turn, turn, {at::randn({2, 3, 32}), at::randn({8})}, kFloat32, "float");
}

Tensors heads(std::int64_t rows, std::int64_t positions) {
  return {at::randn({rows, 2, positions, 3, 8}), at::randn({rows, 2, positions, 1, 8}),
          at::randn({rows, positions, 16})};
}

// Images that are read both ways inside a window, of random lengths, and documents between them:
// compared with the whole mask of which positions see each other.
TEST_F(GemmaLayers, RunsInAWindowAreTheWholeMask) {
  for (const std::int64_t positions : {1, 9, 70, 300}) {
    const at::Tensor flags = at::rand({2, positions}).gt(0.4);
    const at::Tensor starts =
        std::get<0>(at::cummax(at::where(at::rand({2, positions}).lt(0.1), at::arange(positions),
                                         at::zeros({2, positions}, at::kLong)),
                               1));
    for (const std::int64_t window : {1, 5, 64, 1000}) {
      const at::Tensor visible = seen_by_each(window, flags, starts);
      const AttentionMask mask{
          .window = window, .begins = starts, .ends = ends_of_runs(flags, {starts})};
      expect_equals_composite(
          [&](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.5, mask); },
          [&](const Tensors& in) { return masked_attention(in[0], in[1], in[2], visible, 0.5); },
          heads(2, positions), {1e-6, 4e-6},
          std::to_string(positions) + " positions, window " + std::to_string(window));
    }
  }
}

// Keys after the end have no influence, neither on the result nor on gradients, and a query that
// does not see itself is as others.
TEST_F(GemmaLayers, HiddenKeysHaveNoInfluence) {
  Tensors in = heads(1, 6);
  for (at::Tensor& tensor : in) tensor.requires_grad_(true);
  const AttentionMask mask{.ends = at::full({1, 6}, 4, at::kLong)};
  const at::Tensor out = causal_attention(in[0], in[1], in[2], 1.0, mask);
  out.sum().backward();
  EXPECT_EQ(in[1].grad().narrow(2, 4, 2).abs().max().item<double>(), 0.0);
  EXPECT_EQ(in[2].grad().narrow(1, 4, 2).abs().max().item<double>(), 0.0);
  const at::NoGradGuard no_grad;
  in[1].narrow(2, 4, 2).fill_(1e4);
  in[2].narrow(1, 4, 2).fill_(-7.0);
  EXPECT_TRUE(causal_attention(in[0], in[1], in[2], 1.0, mask).equal(out));
  const at::Tensor visible = at::arange(6).lt(4).view({1, 1, 6});
  EXPECT_TRUE(at::allclose(masked_attention(in[0], in[1], in[2], visible, 1.0), out, 1e-5, 1e-5));
}

TEST_F(GemmaLayers, ARunEndsAtItsLastFlagAndAtItsDocument) {
  const at::Tensor flags =
      at::tensor({1, 1, 0, 1, 0, 0, 1, 1}, at::kInt).view({2, 4}).to(at::kBool);
  EXPECT_TRUE(
      ends_of_runs(flags, {}).equal(at::tensor({2, 2, 3, 4, 1, 2, 4, 4}, at::kLong).view({2, 4})));
  const at::Tensor starts = at::tensor({0, 1, 1, 1, 0, 0, 0, 3}, at::kLong).view({2, 4});
  EXPECT_TRUE(ends_of_runs(flags, {starts})
                  .equal(at::tensor({1, 2, 3, 4, 1, 2, 3, 4}, at::kLong).view({2, 4})));
  EXPECT_EQ(ends_of_runs(at::empty({2, 0}, at::kBool), {}).numel(), 0);
  EXPECT_EQ(ends_of_runs(at::empty({0, 3}, at::kBool), {}).numel(), 0);
}

// Query, window, images: what the first layers of the family say.
TEST_F(GemmaLayers, AWindowCountsTheQueryItselfAndHasNoUpperEndInsideABlock) {
  const at::Tensor flags = at::tensor({0, 1, 1, 1, 0}, at::kInt).to(at::kBool).view({1, 5});
  const at::Tensor expected = at::tensor({1, 0, 0, 0, 0,  //
                                          1, 1, 1, 1, 0,  //
                                          0, 1, 1, 1, 0,  //
                                          0, 0, 1, 1, 0,  //
                                          0, 0, 0, 1, 1},
                                         at::kInt)
                                  .to(at::kBool)
                                  .view({1, 5, 5});
  EXPECT_TRUE(seen_by_each(2, flags, at::zeros({1, 5}, at::kLong)).equal(expected));
}

}  // namespace
}  // namespace tessera::nn::gemma_layers_test
