// Grouped products against a loop over the groups, for each way to form them.
#include "nn/grouped_linear.h"

#include <limits>

#include "counted_calls.h"
#include "nn/mlp.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::grouped_linear_test {
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

TEST_F(GroupedLinear, AFrozenWeightsProductIsNotFormed) {
  for (const bool trains : {true, false}) {
    const at::Tensor x = at::randn({9, 16}).requires_grad_(true);
    const at::Tensor weight = at::randn({3, 24, 16}).requires_grad_(trains);
    const at::Tensor y = grouped_linear(x, {weight}, {0, 4, 4, 9});
    const test::CountedCalls products({"aten::_grouped_mm"});
    y.sum().backward();
    EXPECT_EQ(products.count(), trains ? 2 : 1);
  }
}

// A loop without begins would return memory as it was.
TEST_F(GroupedLinear, ALoopAsksForTheBegins) {
  const at::Tensor a = at::randn({8, 16}), b = at::randn({2, 16, 8});
  const RowGroups on_device{{}, at::tensor({3, 8}, at::kInt)};
  for (const GroupedWay way : {GroupedWay::kLoop, GroupedWay::kRoundedRows}) {
    EXPECT_THROW(grouped_rows(a, b, on_device, way), Error);
    EXPECT_THROW(grouped_outer(a, a, on_device, way), Error);
  }
}

TEST_F(GroupedLinear, TheKernelOfDevicesIsOfHopperAndTheFirstBlackwell) {
  for (const int capability : {0, 90, 100, 103}) EXPECT_TRUE(has_grouped_kernel(capability));
  for (const int capability : {70, 80, 86, 89, 110, 120}) {
    EXPECT_FALSE(has_grouped_kernel(capability)) << capability;
  }
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

const auto clamped = [](const Tensors& in) { return clamped_swiglu(in[0], {1.702, 2.0}); };
const auto clamped_composite = [](const Tensors& in) {
  return clamped_swiglu_composite(in[0], {1.702, 2.0});
};

TEST(Gated, ClampedSwigluEqualsItsCompositeInsideAndOutsideTheLimit) {
  at::manual_seed(23);
  // Odd sizes end within the kernel's lanes.
  for (const std::int64_t inner : {1, 7, 8, 13, 16, 500}) {
    for (const std::int64_t rows : {0, 1, 31}) {
      const at::Tensor both = at::randn({rows, 2 * inner}) * 3;
      const std::string what = std::to_string(rows) + " of " + std::to_string(inner);
      expect_equals_composite(clamped, clamped_composite, {both.to(at::kDouble)}, {1e-13, 1e-14},
                              what + ", double");
      expect_equals_composite(clamped, clamped_composite, {both}, kFloat32, what + ", float");
      expect_equals_composite(clamped, clamped_composite, {both.to(at::kBFloat16)},
                              kOneBFloat16Rounding, what + ", bfloat16");
    }
  }
  // A tail of the sigmoid that nothing clamps, and columns that are not side by side.
  expect_equals_composite(clamped, clamped_composite, {at::randn({9, 30}) * 40}, kFloat32, "tails");
  const auto narrowed = [](const Tensors& in) {
    return clamped_swiglu(in[0].narrow(1, 1, 18), {1.702, 2.0});
  };
  const auto narrowed_composite = [](const Tensors& in) {
    return clamped_swiglu_composite(in[0].narrow(1, 1, 18), {1.702, 2.0});
  };
  expect_equals_composite(narrowed, narrowed_composite, {at::randn({9, 30})}, kFloat32, "narrowed");
}

/// Equal as numbers are, NaN where the other has NaN.
void expect_same_kind(const at::Tensor& found, const at::Tensor& expected,
                      const std::string& what) {
  EXPECT_TRUE(at::allclose(found.to(at::kDouble), expected.to(at::kDouble), 1.0 / 128, 1e-6,
                           /*equal_nan=*/true))
      << what << "\n"
      << found << "\n"
      << expected;
}

// On the limit is inside it; NaN and infinities go where the formula takes them.
TEST(Gated, ClampedSwigluOnItsEdgesAndBeyondNumbersIsItsComposite) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> values{2.0,  -2.0,  2.015625, -2.015625, 0.0,  -0.0,  1.0, -1.0,
                                   80.0, -80.0, 1e30,     -1e30,     kInf, -kInf, kNan};
  std::vector<double> pairs;
  for (const double gate : values) {
    for (const double up : values) pairs.insert(pairs.end(), {gate, up});
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor both = at::tensor(pairs, at::kDouble).to(dtype).view({15, 30});
    for (const double grad : {0.75, kInf}) {
      const at::Tensor of_result = at::full({15, 15}, grad, at::kDouble).to(dtype);
      const Tensors found = run(clamped, {both}, of_result);
      const Tensors expected = run(clamped_composite, {both}, of_result);
      const std::string what = std::string(c10::toString(dtype)) + ", " + std::to_string(grad);
      expect_same_kind(found[0], expected[0], what + ": output");
      expect_same_kind(found[1], expected[1], what + ": gradient");
    }
  }
}

}  // namespace
}  // namespace tessera::nn::grouped_linear_test
