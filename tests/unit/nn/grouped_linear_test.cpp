// Grouped products against a loop over the groups, whatever way they are formed.
#include "nn/grouped_linear.h"

#include "nn/gated.h"
#include "nn/mlp.h"
#include "unit/nn/compare.h"

namespace tessera::nn {
namespace {

using Tensors = std::vector<at::Tensor>;

class GroupedLinear : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(17); }
};

/// Even, uneven, empty at the front, in the middle and at the end, all in one, and nothing at all.
const std::vector<GroupOffsets>& splits() {
  static const std::vector<GroupOffsets> all{{0, 32, 64, 96}, {0, 4, 4, 9},    {0, 0, 17, 50},
                                             {0, 40, 49, 49}, {0, 37, 37, 37}, {0, 0, 0, 0}};
  return all;
}

GroupedWeights weights_of(const Tensors& in, GroupLayout layout) {
  return {in[1], in.size() > 2 ? in[2] : at::Tensor(), layout};
}

/// Inputs for K = 16, N = 24 (multiples of 16 bytes) or odd ones.
Tensors inputs_of(const GroupOffsets& offsets, GroupLayout layout, bool odd, bool bias) {
  const std::int64_t k = odd ? 7 : 16;
  const std::int64_t n = odd ? 9 : 24;
  const auto groups = static_cast<std::int64_t>(offsets.size()) - 1;
  const bool out_in = layout == GroupLayout::kOutIn;
  Tensors in{at::randn({offsets.back(), k}),
             at::randn(out_in ? std::vector{groups, n, k} : std::vector{groups, k, n})};
  if (bias) in.push_back(at::randn({groups, n}));
  return in;
}

TEST_F(GroupedLinear, EqualsItsCompositeInEveryLayoutDtypeAndSplit) {
  for (const GroupOffsets& offsets : splits()) {
    for (const GroupLayout layout : {GroupLayout::kOutIn, GroupLayout::kInOut}) {
      for (const bool odd : {false, true}) {
        for (const bool bias : {false, true}) {
          const auto fused = [&](const Tensors& in) {
            return grouped_linear(in[0], weights_of(in, layout), offsets);
          };
          const auto composite = [&](const Tensors& in) {
            return grouped_linear_composite(in[0], weights_of(in, layout), offsets);
          };
          const Tensors inputs = inputs_of(offsets, layout, odd, bias);
          const std::string what = std::to_string(offsets.back()) + " rows, odd " +
                                   std::to_string(odd) + ", bias " + std::to_string(bias);
          expect_equals_composite(fused, composite, inputs, kFloat32, what);
          Tensors narrow;
          for (const at::Tensor& input : inputs) narrow.push_back(input.to(at::kBFloat16));
          // The bias is added to a rounded product: two roundings of parts of the result.
          expect_equals_composite(fused, composite, narrow, {1.0 / 128, 1.0 / 256},
                                  what + ", bfloat16");
          Tensors mixed = inputs;
          mixed[0] = inputs[0].to(at::kBFloat16);
          expect_equals_composite(fused, composite, mixed, kOneBFloat16Rounding,
                                  what + ", bfloat16 in, weights float");
        }
      }
    }
  }
}

TEST_F(GroupedLinear, LibtorchsProductsAreBitwiseTheLoopInFloat32) {
  for (const GroupOffsets& offsets : splits()) {
    if (offsets.back() == 0) continue;
    const at::Tensor x = at::randn({offsets.back(), 16});
    const at::Tensor grad = at::randn({offsets.back(), 24});
    const at::Tensor weight = at::randn({3, 24, 16});
    ASSERT_EQ(grouped_way(x, weight.transpose(1, 2)), GroupedWay::kLibtorch);
    ASSERT_EQ(grouped_way(grad, x), GroupedWay::kLibtorch);
    EXPECT_TRUE(grouped_rows(x, weight.transpose(1, 2), offsets, GroupedWay::kLibtorch)
                    .equal(grouped_rows(x, weight.transpose(1, 2), offsets, GroupedWay::kLoop)));
    EXPECT_TRUE(grouped_rows(grad, weight, offsets, GroupedWay::kLibtorch)
                    .equal(grouped_rows(grad, weight, offsets, GroupedWay::kLoop)));
    EXPECT_TRUE(grouped_outer(grad, x, offsets, GroupedWay::kLibtorch)
                    .equal(grouped_outer(grad, x, offsets, GroupedWay::kLoop)));
  }
}

TEST_F(GroupedLinear, RowsPastAGroupsEndLeaveNoTraceInItsGradient) {
  // Rounded up, the first group's product covers the second's rows: not finite, yet not its own.
  const GroupOffsets offsets{0, 5, 12, 40};
  const at::Tensor x = at::randn({40, 16}).to(at::kBFloat16);
  x.narrow(0, 5, 7).fill_(std::numeric_limits<float>::infinity());
  const at::Tensor grad = at::randn({40, 24}).to(at::kBFloat16);
  ASSERT_EQ(grouped_way(grad, x), GroupedWay::kRoundedRows);
  const at::Tensor outer = grouped_outer(grad, x, offsets, GroupedWay::kRoundedRows);
  EXPECT_TRUE(outer[0].isfinite().all().item<bool>());
  EXPECT_FALSE(outer[1].isfinite().all().item<bool>());
  EXPECT_TRUE(outer[2].isfinite().all().item<bool>());
  const at::Tensor y =
      grouped_rows(x, at::randn({3, 16, 8}).to(at::kBFloat16), offsets, GroupedWay::kRoundedRows);
  EXPECT_TRUE(y.narrow(0, 0, 5).isfinite().all().item<bool>());
  EXPECT_TRUE(y.narrow(0, 12, 28).isfinite().all().item<bool>());
}

TEST_F(GroupedLinear, AnExpandedGradientIsTaken) {
  const at::Tensor x = at::randn({9, 16}).requires_grad_(true);
  const at::Tensor weight = at::randn({3, 24, 16}).requires_grad_(true);
  grouped_linear(x, {weight}, {0, 4, 4, 9}).sum().backward();
  EXPECT_TRUE(at::allclose(weight.grad()[0][0], x.detach().narrow(0, 0, 4).sum(0)));
  EXPECT_EQ(weight.grad()[1].abs().max().item<double>(), 0.0);
}

TEST_F(GroupedLinear, AFrozenWeightStillHandsOnTheInputsGradient) {
  const at::Tensor x = at::randn({9, 16}).requires_grad_(true);
  const at::Tensor bias = at::randn({3, 24}).requires_grad_(true);
  grouped_linear(x, {at::randn({3, 24, 16}), bias}, {0, 4, 4, 9}).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_TRUE(bias.grad()[0].equal(at::full({24}, 4.0)));
  EXPECT_TRUE(bias.grad()[1].equal(at::zeros({24})));
}

TEST(Gated, SwigluOfHalvesIsBitwiseThatOfTwoTensors) {
  at::manual_seed(19);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const std::int64_t rows : {0, 1, 37}) {
      const at::Tensor both = at::randn({rows, 46}).to(dtype);
      const at::Tensor grad = at::randn({rows, 23}).to(dtype);
      const Tensors found =
          run([](const Tensors& in) { return swiglu_halves(in[0]); }, {both}, grad);
      const Tensors expected = run(
          [](const Tensors& in) { return swiglu(in[0].narrow(1, 0, 23), in[0].narrow(1, 23, 23)); },
          {both}, grad);
      EXPECT_TRUE(found[0].equal(expected[0]));
      EXPECT_TRUE(found[1].equal(expected[1]));
    }
  }
}

TEST(Gated, ClampedSwigluEqualsItsCompositeInsideAndOutsideTheLimit) {
  at::manual_seed(23);
  const ClampedSwiglu options{1.702, 2.0};
  const auto fused = [&](const Tensors& in) { return clamped_swiglu(in[0], options); };
  const auto composite = [&](const Tensors& in) {
    return clamped_swiglu_composite(in[0], options);
  };
  const at::Tensor both = at::randn({31, 26}) * 3;
  expect_equals_composite(fused, composite, {both.to(at::kDouble)}, {1e-13, 1e-14}, "double");
  expect_equals_composite(fused, composite, {both}, kFloat32, "float");
  expect_equals_composite(fused, composite, {both.to(at::kBFloat16)}, kOneBFloat16Rounding,
                          "bfloat16");
}

}  // namespace
}  // namespace tessera::nn
