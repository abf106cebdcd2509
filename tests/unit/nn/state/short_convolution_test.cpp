// The short convolution against at::conv1d in fp64, on each document alone.
#include "nn/state/short_convolution.h"

#include <ATen/ATen.h>

#include "dry/fake_operations.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::nn::short_convolution_test {
namespace {

using packed::documents_of;
using packed::drawn_rows;
using packed::Lengths;
using packed::one_by_one;
using Tensors = std::vector<at::Tensor>;

/// x, weight and the bias, if there is one, on one document.
at::Tensor plain(const Tensors& in) {
  const at::Tensor& weight = in[1];
  const std::int64_t channels = weight.size(0), width = weight.size(2), positions = in[0].size(1);
  const std::optional<at::Tensor> bias = in.size() > 2 ? std::optional(in[2]) : std::nullopt;
  const at::Tensor all = at::conv1d(in[0].transpose(1, 2), weight, bias, /*stride=*/1,
                                    /*padding=*/width - 1, /*dilation=*/1, /*groups=*/channels);
  return at::silu(all.narrow(2, 0, positions)).transpose(1, 2);
}

struct Case {
  Tensors in;  ///< x, weight and perhaps a bias, in fp64
  std::vector<Lengths> rows;
  Documents documents;
};

Case drawn_case(std::uint64_t seed, bool packed) {
  std::mt19937_64 random(seed);
  at::manual_seed(seed);
  const auto up_to = [&](std::uint64_t most) {
    return static_cast<std::int64_t>(1 + random() % most);
  };
  // Some have more positions than are computed at once (2^18 elements).
  const bool large = random() % 4 == 0;
  const std::int64_t rows = large ? 2 : up_to(2), positions = large ? 140 : up_to(150);
  const std::int64_t channels = large ? 2000 : up_to(40), width = up_to(5);
  Case result;
  result.in = {at::randn({rows, positions, channels}, at::kDouble),
               at::randn({channels, 1, width}, at::kDouble).mul_(0.5)};
  if (random() % 2 == 0) result.in.push_back(at::randn({channels}, at::kDouble));
  result.rows = packed ? drawn_rows(random, rows, positions)
                       : std::vector<Lengths>(static_cast<std::size_t>(rows), {positions});
  if (packed) result.documents = documents_of(result.rows);
  return result;
}

at::Tensor found_of(const Tensors& in, const Documents& documents) {
  return short_convolution(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor(), documents);
}

void compare_with_conv1d(const Case& of, const Bound& bound) {
  const at::Tensor grad = at::randn(of.in[0].sizes()).to(at::kBFloat16);
  Tensors wide;
  for (const at::Tensor& x : of.in) wide.push_back(x.to(at::kDouble));
  const Tensors found =
      run([&](const Tensors& in) { return found_of(in, of.documents); }, of.in, grad);
  const Tensors expected = run(
      [&](const Tensors& in) {
        return one_by_one({in[0]}, of.rows, [&](const Tensors& x) {
          Tensors alone = in;
          alone[0] = x[0];
          return plain(alone);
        });
      },
      wide, grad);
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_close(found[i], expected[i], bound, "tensor " + std::to_string(i));
  }
}

TEST(ShortConvolution, IsConv1dOfEachDocument) {
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE(seed);
    compare_with_conv1d(drawn_case(seed, seed % 2 == 0), {0, 1e-13});
  }
}

TEST(ShortConvolution, InFloat32IsOffBySumsOfRoundings) {
  for (std::uint64_t seed = 20; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    Case of = drawn_case(seed, seed % 2 == 0);
    for (at::Tensor& x : of.in) x = x.to(at::kFloat);
    compare_with_conv1d(of, kFloat32);
  }
}

// Values that bf16 holds exactly, sums and all: nothing but the silu and the result is rounded.
TEST(ShortConvolution, SumsProductsOfBFloat16InFloat32) {
  at::manual_seed(3);
  const at::Tensor x = at::randint(-8, 9, {1, 30, 6}).to(at::kBFloat16);
  const at::Tensor weight = at::tensor({1.0, 256.0, -1.0, -256.0}).repeat({6, 1}).unsqueeze(1);
  const at::Tensor sums =
      at::conv1d(x.to(at::kDouble).transpose(1, 2), weight.to(at::kDouble), {}, 1, 3, 1, 6)
          .narrow(2, 0, 30)
          .transpose(1, 2);
  const at::Tensor expected = at::silu(sums.to(at::kBFloat16));
  EXPECT_TRUE(at::equal(short_convolution(x, weight.to(at::kBFloat16), {}, {}), expected));
}

// As nn::linear: the input is rounded to the weight's dtype, raw gradients of parameters have it.
TEST(ShortConvolution, ComputesInTheWeightsDtype) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({2, 9, 5}).requires_grad_();
  const at::Tensor weight = at::randn({5, 1, 4}).to(at::kBFloat16).requires_grad_();
  const at::Tensor y = short_convolution(x, weight, {}, {});
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(y, short_convolution(x.to(at::kBFloat16), weight, {}, {}).to(at::kFloat)));
  y.sum().backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

TEST(ShortConvolution, NothingComesOverABorder) {
  at::manual_seed(5);
  const at::Tensor x = at::randn({1, 20, 3}), weight = at::randn({3, 1, 4});
  const Documents documents = documents_of({{7, 1, 12}});
  const at::Tensor before = short_convolution(x, weight, {}, documents);
  x.narrow(1, 0, 7).fill_(std::numeric_limits<double>::quiet_NaN());
  const at::Tensor after = short_convolution(x, weight, {}, documents);
  EXPECT_TRUE(at::equal(before.narrow(1, 7, 13), after.narrow(1, 7, 13)));
}

TEST(ShortConvolution, DecodesInStepsOfAnySize) {
  for (std::uint64_t seed = 40; seed < 46; ++seed) {
    std::mt19937_64 random(seed);
    const Case of = drawn_case(seed, false);
    const at::Tensor& x = of.in[0];
    const at::Tensor bias = of.in.size() > 2 ? of.in[2] : at::Tensor();
    at::Tensor context;
    Tensors parts;
    for (std::int64_t begin = 0; begin < x.size(1);) {
      const auto left = static_cast<std::uint64_t>(x.size(1) - begin);
      const auto count = random() % 2 == 0 ? 1 : static_cast<std::int64_t>(1 + random() % left);
      parts.push_back(short_convolution_after(x.narrow(1, begin, count), of.in[1], bias, context));
      begin += count;
    }
    EXPECT_EQ(context.sizes(), at::IntArrayRef({x.size(0), of.in[1].size(2) - 1, x.size(2)}));
    // Not the same bits: a silu at the end of its range takes no vectors.
    expect_close(at::cat(parts, 1), found_of(of.in, {}), {0, 1e-15}, "output");
  }
}

TEST(ShortConvolution, RunsOnTensorsWithoutValues) {
  const dry::FakeScope fake;
  const at::Tensor x = at::empty({2, 50, 6}, at::kBFloat16).requires_grad_();
  const at::Tensor weight = at::empty({6, 1, 4}, at::kBFloat16).requires_grad_();
  const at::Tensor y = short_convolution(x, weight, {}, documents_of({{20, 30}, {50}}));
  EXPECT_TRUE(dry::is_fake(y));
  y.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(weight.grad().sizes(), weight.sizes());
}

}  // namespace
}  // namespace tessera::nn::short_convolution_test
