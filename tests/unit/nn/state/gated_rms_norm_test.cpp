// Norms with a gate against their formulas in fp64, and their roundings against transformers'.
#include "nn/state/gated_rms_norm.h"

#include <ATen/ATen.h>

#include "dry/fake_operations.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::nn::gated_rms_norm_test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-5;
constexpr Bound kFloat64{0, 1e-13};

at::Tensor normed(const at::Tensor& x) { return x / (x.square().mean(-1, true) + kEps).sqrt(); }

at::Tensor plain_norm(const Tensors& in) { return normed(in[0]) * in[2] * at::silu(in[1]); }

Function plain_groups(std::int64_t groups) {
  return [groups](const Tensors& in) {
    const at::Tensor gated = (in[0] * at::silu(in[1])).unflatten(-1, {groups, -1});
    return normed(gated).flatten(-2) * in[2];
  };
}

at::Tensor found_norm(const Tensors& in) { return gated_rms_norm(in[0], in[1], in[2], kEps); }

Function found_groups(std::int64_t groups) {
  return
      [groups](const Tensors& in) { return gated_group_norm(in[0], in[1], in[2], groups, kEps); };
}

/// x, z [B, T, ...] and weight in fp64.
Tensors drawn(at::IntArrayRef sizes) {
  return {at::randn(sizes, at::kDouble), at::randn(sizes, at::kDouble).mul_(2),
          at::randn({sizes.back()}, at::kDouble)};
}

Tensors in_dtype(const Tensors& in, at::ScalarType dtype) {
  return {in[0].to(dtype), in[1].to(dtype), in[2].to(at::promote_types(dtype, at::kFloat))};
}

void compare_all(at::ScalarType dtype, const Bound& bound) {
  at::manual_seed(1);
  // The last one is more than what is computed at once (2^18 elements).
  for (const std::vector<std::int64_t>& sizes :
       std::vector<std::vector<std::int64_t>>{{2, 5, 3, 8}, {1, 1, 2, 3}, {3, 1000, 2, 64}}) {
    expect_equals_composite(found_norm, plain_norm, in_dtype(drawn(sizes), dtype), bound, "norm");
  }
  for (const std::int64_t groups : {1, 3, 12}) {
    expect_equals_composite(found_groups(groups), plain_groups(groups),
                            in_dtype(drawn({2, 7, 24}), dtype), bound, "groups");
  }
}

TEST(GatedRmsNorm, IsItsFormula) { compare_all(at::kDouble, kFloat64); }

TEST(GatedRmsNorm, InFloat32IsOffBySumsOfRoundings) { compare_all(at::kFloat, kFloat32); }

// Two roundings, of the normalized value and of the result. The gradient of the weight is a sum of
// terms of which each had the first one.
TEST(GatedRmsNorm, RoundsBFloat16Twice) {
  compare_all(at::kBFloat16, {2.0 / 256 + 1.0 / 65536, 1.0 / 256});
}

TEST(GatedRmsNorm, RoundsAsTransformersDoes) {
  at::manual_seed(2);
  const Tensors in = in_dtype(drawn({2, 9, 4, 16}), at::kBFloat16);
  const at::Tensor x = in[0].to(at::kFloat), gate = at::silu(in[1].to(at::kFloat));
  const auto rounded = [](const at::Tensor& value) {
    const at::Tensor scale = at::rsqrt(value.square().mean(-1, true) + kEps);
    return (value * scale).to(at::kBFloat16).to(at::kFloat);
  };
  EXPECT_TRUE(at::equal(found_norm(in), (in[2] * rounded(x) * gate).to(at::kBFloat16)));
  EXPECT_TRUE(at::equal(found_groups(1)(in), (in[2] * rounded(x * gate)).to(at::kBFloat16)));
}

TEST(GatedRmsNorm, TakesViewsAndNoRows) {
  at::manual_seed(3);
  const Tensors in = drawn({4, 3, 8});
  const auto turned = [](const at::Tensor& x) { return x.transpose(0, 1); };
  const at::Tensor y = gated_rms_norm(turned(in[0]), turned(in[1]), in[2], kEps);
  EXPECT_TRUE(at::equal(y, turned(found_norm(in))));
  const Tensors none = drawn({0, 3, 8});
  const Tensors grads = run(found_groups(2), none, at::zeros({0, 3, 8}));
  EXPECT_EQ(grads[1].sizes(), none[0].sizes());
  EXPECT_TRUE(grads[3].eq(0).all().item<bool>());
}

TEST(GatedRmsNorm, WeightHasARawGradientInFloat32) {
  const dry::FakeScope fake;
  const auto make = [](std::vector<std::int64_t> sizes, at::ScalarType dtype) {
    return at::empty(sizes, dtype).requires_grad_();
  };
  const Tensors in = {make({2, 3, 8}, at::kBFloat16), make({2, 3, 8}, at::kBFloat16),
                      make({8}, at::kFloat)};
  for (const Function& f : {Function(found_norm), found_groups(2)}) {
    const at::Tensor y = f(in);
    EXPECT_TRUE(dry::is_fake(y));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(in[2].grad().scalar_type(), at::kFloat);
    EXPECT_EQ(in[1].grad().sizes(), in[1].sizes());
  }
}

}  // namespace
}  // namespace tessera::nn::gated_rms_norm_test
