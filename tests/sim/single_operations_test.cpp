// Operations that are one kernel on a GPU are one launch here, with the bits of the same call on
// the CPU; those that this folder computes itself are compared with composites in fp64.
#include <ATen/ATen.h>

#include <cmath>
#include <tuple>

#include "sim/streams.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::sim::single_operations_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Operation = std::function<Tensors(const Tensors&)>;

template <class... Results>
Tensors listed(const std::tuple<Results...>& results) {
  return std::apply([](const auto&... each) { return Tensors{each...}; }, results);
}

/// Expects one launch of that name, no other, no wait; and the CPU's bits, which are returned.
Tensors expect_single(const std::string& name, const Operation& operation, const Tensors& inputs) {
  const Tensors expected = operation(inputs);
  Tensors there;
  for (const at::Tensor& input : inputs) there.push_back(input.to(device(0)));
  take_counts();
  const Tensors found = operation(there);
  const Counts counts = take_counts();
  EXPECT_THAT(counts.launches, ElementsAre(testing::Pair(name, 1)));
  EXPECT_TRUE(counts.waits.empty()) << name;
  EXPECT_EQ(found.size(), expected.size()) << name;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (found[i].defined()) {
      EXPECT_EQ(found[i].device(), device(0)) << name;
    }
    expect_same_bits(found[i], expected[i], name + ", result " + std::to_string(i));
  }
  return expected;
}

TEST(SingleOperations, RmsNormAndItsBackward) {
  constexpr double kEps = 1e-6;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = drawn(1, {5, 7, 24}, dtype), weight = drawn(2, {24}, dtype);
    const at::Tensor grad = drawn(3, {5, 7, 24}, dtype);
    const Tensors normed = expect_single(
        "_fused_rms_norm",
        [&](const Tensors& in) { return listed(at::_fused_rms_norm(in[0], {24}, in[1], kEps)); },
        {x, weight});
    const Tensors grads = expect_single("_fused_rms_norm_backward",
                                        [&](const Tensors& in) {
                                          return listed(at::_fused_rms_norm_backward(
                                              in[0], in[1], {24}, in[2], in[3], {true, true}));
                                        },
                                        {grad, x, normed[1], weight});
    const at::Tensor wide = x.to(at::kDouble).requires_grad_(true);
    const at::Tensor factors = weight.to(at::kDouble).requires_grad_(true);
    const at::Tensor y = wide * at::rsqrt(wide.pow(2).mean(-1, true) + kEps) * factors;
    y.backward(grad.to(at::kDouble));
    const nn::Bound bound = dtype == at::kFloat ? nn::kFloat32 : nn::kOneBFloat16Rounding;
    nn::expect_close(normed[0], y.detach(), bound, "norm");
    nn::expect_close(grads[0], wide.grad(), bound, "gradient of x");
    nn::expect_close(grads[1], factors.grad(), bound, "gradient of the weight");
  }
}

TEST(SingleOperations, FlashAttentionAndItsBackwardWithGroupedKeys) {
  constexpr std::int64_t kRows = 2, kHeads = 6, kGroups = 2, kPositions = 33, kHeadDim = 16;
  const at::Tensor q = drawn(1, {kRows, kHeads, kPositions, kHeadDim}, at::kBFloat16);
  const at::Tensor k = drawn(2, {kRows, kGroups, kPositions, kHeadDim}, at::kBFloat16);
  const at::Tensor v = drawn(3, {kRows, kGroups, kPositions, kHeadDim}, at::kBFloat16);
  const at::Tensor grad = drawn(4, q.sizes(), at::kBFloat16);
  const Tensors mixed = expect_single("_scaled_dot_product_flash_attention",
                                      [&](const Tensors& in) {
                                        const auto result = at::_scaled_dot_product_flash_attention(
                                            in[0], in[1], in[2], 0.0,
                                            /*is_causal=*/true, false, 0.3);
                                        EXPECT_EQ(std::get<4>(result), kPositions);
                                        EXPECT_FALSE(std::get<2>(result).defined());
                                        return Tensors{std::get<0>(result), std::get<1>(result)};
                                      },
                                      {q, k, v});
  const Tensors grads = expect_single(
      "_scaled_dot_product_flash_attention_backward",
      [&](const Tensors& in) {
        const at::Tensor none = at::empty({0}, in[0].options().dtype(at::kLong));
        return listed(at::_scaled_dot_product_flash_attention_backward(
            in[0], in[1], in[2], in[3], in[4], in[5], {}, {}, kPositions, kPositions, 0.0,
            /*is_causal=*/true, none, none, 0.3));
      },
      {grad, q, k, v, mixed[0], mixed[1]});
  Tensors wide;
  for (const at::Tensor& input : {q, k, v}) wide.push_back(input.to(at::kDouble).requires_grad_());
  const auto every = [&](const at::Tensor& x) { return x.repeat_interleave(kHeads / kGroups, 1); };
  const at::Tensor behind = at::ones({kPositions, kPositions}, at::kBool).triu(1);
  const at::Tensor scores = at::matmul(wide[0], every(wide[1]).transpose(2, 3)) * 0.3;
  const at::Tensor y =
      at::matmul(at::softmax(scores.masked_fill(behind, -INFINITY), -1), every(wide[2]));
  y.backward(grad.to(at::kDouble));
  // The kernel rounds weights and their gradients to bf16 before it multiplies with them, and the
  // sums over a group's queries are formed of rounded terms: a few roundings of the largest.
  const nn::Bound bound{4.0 / 256, 4.0 / 256};
  nn::expect_close(mixed[0], y.detach(), bound, "flash attention");
  for (std::size_t i = 0; i < 3; ++i) {
    nn::expect_close(grads[i], wide[i].grad(), bound, "gradient " + std::to_string(i));
  }
}

TEST(SingleOperations, FlashAttentionTakesWhatCudaTakes) {
  const auto run = [](const at::Tensor& q) {
    return refusal_of([&] { at::_scaled_dot_product_flash_attention(q, q, q, 0.0, true); });
  };
  EXPECT_EQ(run(drawn(1, {1, 2, 4, 8}, at::kHalf).to(device(0))), "");
  EXPECT_THAT(run(drawn(1, {1, 2, 4, 8}).to(device(0))), Says("found Float"));
  EXPECT_THAT(run(drawn(1, {1, 2, 4, 12}, at::kHalf).to(device(0))), Says("found 12"));
}

TEST(SingleOperations, GroupedProducts) {
  const at::Tensor rows = drawn(1, {12, 16}, at::kBFloat16);
  const at::Tensor experts = drawn(2, {3, 16, 8}, at::kBFloat16);
  const at::Tensor ends = at::tensor({5, 5, 12}, at::kInt);
  const Tensors product =
      expect_single("_grouped_mm",
                    [](const Tensors& in) { return Tensors{at::_grouped_mm(in[0], in[1], in[2])}; },
                    {rows, experts, ends});
  const at::Tensor first = at::mm(rows.narrow(0, 0, 5), experts[0]);
  nn::expect_close(product[0].narrow(0, 0, 5), first.to(at::kDouble), nn::kOneBFloat16Rounding,
                   "the first expert's rows");
}

TEST(SingleOperations, GroupedProductsOfOtherDtypesReadTheirOffsetsOnTheHost) {
  const at::Tensor rows = drawn(1, {12, 16}).to(device(0));
  const at::Tensor experts = drawn(2, {3, 16, 8}).to(device(0));
  const at::Tensor ends = at::tensor({5, 5, 12}, at::kInt).to(device(0));
  take_counts();
  at::_grouped_mm(rows, experts, ends);
  EXPECT_EQ(take_counts().waits, (std::map<std::string, std::int64_t>{{"_grouped_mm", 1}}));
}

TEST(SingleOperations, AdamWAndListsOfTensors) {
  const auto lists = [](const Tensors& in) {
    Tensors parameters{in[0].clone(), in[1].clone()}, first{in[2].clone(), in[3].clone()};
    Tensors second{in[2].abs(), in[3].abs()}, steps{in[6].clone(), in[6].clone()};
    take_counts();
    at::_fused_adamw_(parameters, {in[4], in[5]}, first, second, {}, steps, 1e-2, 0.9, 0.95, 0.1,
                      1e-8, /*amsgrad=*/false, /*maximize=*/false);
    return Tensors{parameters[0], parameters[1], first[0], first[1], second[0], second[1]};
  };
  expect_single("_fused_adamw_", lists,
                {drawn(1, {7}), drawn(2, {3, 5}), drawn(3, {7}), drawn(4, {3, 5}), drawn(5, {7}),
                 drawn(6, {3, 5}), at::ones({})});
  const Tensors two{drawn(1, {7}), drawn(2, {3, 5})};
  expect_single(
      "_foreach_norm.Scalar",
      [](const Tensors& in) { return at::_foreach_norm(in, 2, at::kDouble); }, two);
  expect_single(
      "_foreach_mul_.Scalar",
      [](const Tensors& in) {
        const Tensors own{in[0].clone(), in[1].clone()};
        take_counts();
        at::_foreach_mul_(own, 3);
        return own;
      },
      two);
}

TEST(SingleOperations, WhatOtherDevicesTakeApart) {
  const Tensors two{drawn(1, {4, 6}), drawn(2, {4, 6})};
  expect_single(
      "silu_backward", [](const Tensors& in) { return Tensors{at::silu_backward(in[0], in[1])}; },
      two);
  expect_single(
      "native_layer_norm",
      [](const Tensors& in) { return listed(at::native_layer_norm(in[0], {6}, {}, {}, 1e-5)); },
      two);
}

}  // namespace
}  // namespace tessera::sim::single_operations_test
