// Dtypes without a kernel: results and gradients have the bits of ATen's operations under autograd,
// whoever wrote their derivatives.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::composite_bits_test {
namespace {

using Tensors = std::vector<at::Tensor>;

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
}  // namespace tessera::nn::composite_bits_test
