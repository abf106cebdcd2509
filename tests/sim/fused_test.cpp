// Results of layers on a device with its own kernels (kernels/fused), forward and backward, against
// their composite forms in fp64 on the CPU.
#include <ATen/DeviceAccelerator.h>

#include <optional>

#include "base/test_hooks.h"
#include "kernels/kernels.h"
#include "nn/attention/attention.h"
#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::fused_on_devices_test {
namespace {

using Tensors = std::vector<at::Tensor>;

/// The simulated one, or a GPU in a program that is linked with one.
at::Device device() { return {at::getAccelerator(/*checked=*/true).value(), 0}; }

/// Roundings to the dtype that follow each other, of the element and of what it is summed from.
Bound roundings(at::ScalarType dtype, int count) {
  const double one = dtype == at::kFloat ? 4e-7 : dtype == at::kHalf ? 1.0 / 2048 : 1.0 / 256;
  return {count * one, count * one + 4e-6};
}

at::Tensor draw(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes).to(dtype); }

/// function(inputs on the device) and its gradients, against the composite's in fp64.
void expect_close_to_fp64(const Function& function, const Function& composite,
                          const Tensors& inputs, const Bound& bound, const std::string& what) {
  Tensors there, wide;
  for (const at::Tensor& input : inputs) {
    there.push_back(input.to(device()));
    wide.push_back(input.to(at::kDouble));
  }
  const at::Tensor grad = at::randn(composite(wide).sizes()).to(at::kBFloat16);
  const Tensors found = run(function, there, grad.to(device()));
  const Tensors expected = run(composite, wide, grad);
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].device(), device());
    expect_close(found[i].cpu(), expected[i], bound,
                 what + (i == 0 ? ": output" : ": gradient " + std::to_string(i - 1)));
  }
}

class OnDevices : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override { at::manual_seed(7); }
  at::ScalarType dtype() const { return GetParam(); }
};

TEST_P(OnDevices, NormsRoundOnce) {
  for (const at::ScalarType weight : {dtype(), at::kFloat}) {
    for (const std::int64_t rows : {0, 1, 75}) {
      for (const auto rounding : {NormRounding::kBeforeWeight, NormRounding::kOnce}) {
        expect_close_to_fp64(
            [&](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5, rounding); },
            [](const Tensors& in) { return rms_norm_composite(in[0], in[1], 1e-5); },
            {draw({rows, 2, 64}, dtype()), draw({64}, weight)}, roundings(dtype(), 1), "norm");
      }
    }
    // The sum is used twice, as in a layer; of whole numbers, which every dtype holds.
    const at::Tensor whole = at::randint(-8, 9, {3, 5, 48}).to(dtype());
    expect_close_to_fp64(
        [](const Tensors& in) {
          const auto [sum, normed] = add_rms_norm(in[0], in[1], in[2], 1e-5);
          return at::cat({sum, normed}, 0);
        },
        [](const Tensors& in) {
          const at::Tensor sum = in[0] + in[1];
          return at::cat({sum, rms_norm_composite(sum, in[2], 1e-5)}, 0);
        },
        {whole, whole.flip(0), draw({48}, weight)}, roundings(dtype(), 2), "sum and norm");
  }
}

// Three roundings a turned element, and one of the norm before it or behind its gradient.
TEST_P(OnDevices, RopeTurnsNormedHeads) {
  for (const std::int64_t head_dim : {2, 8, 34, 64}) {
    Rope rope({}, head_dim);
    const RopeTable table = rope.table(37, dtype(), device());
    const RopeTable wide{table.cos.cpu().to(at::kDouble), table.sin.cpu().to(at::kDouble)};
    const HeadLayout layout{.heads = 6, .repeat = 3};
    const at::Tensor x = draw({2, 37, 6 * head_dim}, dtype());
    for (const at::ScalarType weight : {dtype(), at::kFloat}) {
      expect_close_to_fp64(
          [&](const Tensors& in) { return rope_heads(in[0], layout, {in[1], 1e-6}, table); },
          [&](const Tensors& in) {
            return rope_heads_composite(in[0], layout, {in[1], 1e-6}, wide);
          },
          {x, draw({head_dim}, weight)}, roundings(dtype(), 4), "with norm");
    }
    expect_close_to_fp64(
        [&](const Tensors& in) { return rope_heads(in[0], layout, {}, table); },
        [&](const Tensors& in) { return rope_heads_composite(in[0], layout, {}, wide); }, {x},
        roundings(dtype(), 3), "without norm");
  }
}

// Heads of queries that share keys, values shorter than keys, lengths that no block divides; and
// what flash attention does not take.
TEST_P(OnDevices, CausalAttention) {
  const double scale = 0.25;
  for (const std::int64_t positions : {2, 5, 70, 300}) {
    for (const auto& [head_dim, of_values] :
         {std::pair<std::int64_t, std::int64_t>{16, 16}, {24, 16}, {64, 64}, {12, 12}, {8, 16}}) {
      expect_close_to_fp64(
          [&](const Tensors& in) { return causal_attention(in[0], in[1], in[2], scale); },
          [&](const Tensors& in) { return causal_attention_composite(in[0], in[1], in[2], scale); },
          {draw({2, 2, positions, 3, head_dim}, dtype()),
           draw({2, 2, positions, 1, head_dim}, dtype()),
           draw({2, positions, 2 * of_values}, dtype())},
          dtype() == at::kFloat ? Bound{2e-5, 2e-5} : roundings(dtype(), 4),
          std::to_string(positions) + " positions, heads of " + std::to_string(head_dim) + " and " +
              std::to_string(of_values));
    }
  }
}

/// As a layer calls it: what rope gives is a view, and so is what attention takes.
TEST_P(OnDevices, AttentionOfTurnedHeads) {
  const std::int64_t head_dim = 16;
  Rope rope({}, head_dim);
  const RopeTable table = rope.table(33, dtype(), device());
  const RopeTable wide{table.cos.cpu().to(at::kDouble), table.sin.cpu().to(at::kDouble)};
  const auto attend = [&](const Tensors& in, const RopeTable& by, const auto& turn,
                          const auto& mix) {
    return mix(turn(in[0], HeadLayout{.heads = 6, .repeat = 3}, HeadNorm{}, by),
               turn(in[1], HeadLayout{.heads = 2}, HeadNorm{}, by), in[2], 0.25);
  };
  const auto attention = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) { return causal_attention(q, k, v, scale); };
  expect_close_to_fp64(
      [&](const Tensors& in) { return attend(in, table, rope_heads, attention); },
      [&](const Tensors& in) {
        return attend(in, wide, rope_heads_composite, causal_attention_composite);
      },
      {draw({2, 33, 96}, dtype()), draw({2, 33, 32}, dtype()), draw({2, 33, 32}, dtype())},
      dtype() == at::kFloat ? Bound{2e-5, 2e-5} : roundings(dtype(), 6), "turned heads");
}

TEST_P(OnDevices, Gates) {
  // Wide enough to reach both tails of the sigmoid.
  const at::Tensor gate = draw({3, 40}, dtype()) * 30;
  expect_close_to_fp64([](const Tensors& in) { return swiglu(in[0], in[1]); },
                       [](const Tensors& in) { return swiglu_composite(in[0], in[1]); },
                       {gate, draw({3, 40}, dtype())}, roundings(dtype(), 3), "swiglu");
  expect_close_to_fp64([](const Tensors& in) { return swiglu_halves(in[0]); },
                       [](const Tensors& in) {
                         return swiglu_composite(in[0].narrow(1, 0, 20), in[0].narrow(1, 20, 20));
                       },
                       {gate}, roundings(dtype(), 3), "halves");
}

TEST_P(OnDevices, CrossEntropyIgnoresWhatItIsToldTo) {
  const at::Tensor targets = at::tensor({3, -100, 0, 16, 9, -100}, at::kLong).view({2, 3});
  const at::Tensor near = draw({2, 3, 17}, dtype()) * 4;
  // A target that the model holds for impossible: its logarithm has no digits for the others.
  const at::Tensor far = near.clone();
  far[0][0][3] = -2e4;
  for (const at::Tensor& drawn : {near, far}) {
    for (const Logits use : {Logits::kKeep, Logits::kConsume}) {
      expect_close_to_fp64(
          // Backward overwrites a separate tensor.
          [&](const Tensors& in) {
            return cross_entropy_sum(in[0] * 1, targets.to(in[0].device()), use);
          },
          [&](const Tensors& in) { return cross_entropy_sum_composite(in[0], targets); }, {drawn},
          roundings(dtype(), 2), "loss");
    }
  }
  const at::Tensor logits = draw({2, 3, 17}, dtype()).to(device()).requires_grad_(true);
  const at::Tensor none =
      cross_entropy_sum(logits, at::full({2, 3}, kIgnoredLabel, targets.options()).to(device()));
  EXPECT_EQ(none.item<double>(), 0.0);
  none.backward();
  EXPECT_EQ(logits.grad().abs().sum().item<double>(), 0.0);
}

// Blocks of five rows and a last one of two: the bits of all rows at once.
TEST_P(OnDevices, CrossEntropyInBlocksIsThatOfOne) {
  const at::Tensor logits = (draw({2, 11, 17}, dtype()) * 4).to(device());
  at::Tensor targets = at::arange(22).remainder(17).view({2, 11});
  targets[0][4] = targets[1][10] = kIgnoredLabel;
  const auto run_with = [&](Logits use) {
    const at::Tensor there = targets.to(device());
    return run([&](const Tensors& in) { return cross_entropy_sum(in[0] * 1, there, use); },
               {logits}, at::full({}, 0.25, device()));
  };
  for (const Logits use : {Logits::kKeep, Logits::kConsume}) {
    const Tensors whole = run_with(use);
    const test_hooks::Set in_blocks(test_hooks::elements_at_a_time, [] { return 5 * 17 + 3; });
    const Tensors found = run_with(use);
    ASSERT_EQ(kernels::rows_of_loss(logits), 5);
    for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(found[i], whole[i])) << i;
  }
}

// As experts call it: the ends of groups are on the device, and where its kernel of groups computes
// the products no other code knows them.
TEST_P(OnDevices, GroupedProductsAreThoseOfALoop) {
  for (const GroupOffsets& begins :
       {GroupOffsets{0, 32, 64, 96}, {0, 4, 4, 9}, {0, 0, 17, 50}, {0, 37, 37, 37}}) {
    const auto groups = static_cast<std::int64_t>(begins.size()) - 1;
    const std::vector<std::int64_t> offsets(begins.begin() + 1, begins.end());
    const at::Tensor ends = at::tensor(offsets, at::kLong).to(at::kInt).to(device());
    for (const GroupLayout layout : {GroupLayout::kOutIn, GroupLayout::kInOut}) {
      const bool out_in = layout == GroupLayout::kOutIn;
      const Tensors inputs{
          draw({begins.back(), 16}, dtype()),
          draw(out_in ? std::vector<std::int64_t>{groups, 24, 16} : std::vector{groups, 16L, 24L},
               dtype()),
          draw({groups, 24}, dtype())};
      const bool is_known = needs_begins(inputs[1].to(device()));
      expect_close_to_fp64(
          [&](const Tensors& in) {
            return grouped_linear(in[0], {in[1], in[2], layout},
                                  RowGroups{is_known ? begins : GroupOffsets(), ends});
          },
          [&](const Tensors& in) {
            return grouped_linear_composite(in[0], {in[1], in[2], layout}, begins);
          },
          inputs, dtype() == at::kFloat ? Bound{2e-5, 2e-5} : roundings(dtype(), 4),
          std::to_string(begins.back()) + " rows");
    }
  }
}

// Parameters that adapters freeze: the other gradients have the bits that they have with a gradient
// of the weight.
TEST_P(OnDevices, FrozenNormsLeaveTheOtherGradientsAsTheyAre) {
  Rope rope({}, 8);
  const RopeTable table = rope.table(5, dtype(), device());
  const Tensors inputs{draw({2, 5, 32}, dtype()).to(device()), draw({32}, dtype()).to(device()),
                       draw({8}, dtype()).to(device())};
  const auto gradient_of_x = [&](bool trains) {
    Tensors in;
    for (const at::Tensor& input : inputs) in.push_back(input.clone().requires_grad_(trains));
    in[0].requires_grad_(true);
    const auto [sum, normed] = add_rms_norm(in[0], rms_norm(in[0], in[1], 1e-6), in[1], 1e-6);
    const at::Tensor heads = rope_heads(normed, {.heads = 4, .repeat = 2}, {in[2], 1e-6}, table);
    (heads.sum() + sum.sum()).backward();
    EXPECT_EQ(in[1].grad().defined(), trains);
    EXPECT_EQ(in[2].grad().defined(), trains);
    return in[0].grad();
  };
  EXPECT_TRUE(at::equal(gradient_of_x(false), gradient_of_x(true)));
}

// The numbers are the host's (whose generator has known answers), also from inside a block of
// columns; in several blocks of rows they are those of one.
TEST_P(OnDevices, DropoutDropsWhatTheHostDrops) {
  const DropoutDraw draws[] = {{0.0, 1, 0, 0},
                               {0.05, 0xFFFFFFFFFFFFFFFF, 0, 0},
                               {0.4, 0x0123456789ABCDEF, 5, 0},
                               {0.999, 1, std::int64_t{1} << 31, 7}};
  for (const DropoutDraw& one : draws) {
    for (const std::vector<std::int64_t>& sizes :
         {std::vector<std::int64_t>{3, 5, 7}, {1, 1, 1}, {2, 33, 64}, {0, 4, 8}}) {
      const at::Tensor expected = dropout_factors(one, sizes, dtype());
      EXPECT_TRUE(dropout_factors(one, sizes, dtype(), device()).cpu().equal(expected)) << sizes;
      const test_hooks::Set in_parts(test_hooks::elements_at_a_time, [] { return 100; });
      EXPECT_TRUE(dropout_factors(one, sizes, dtype(), device()).cpu().equal(expected)) << sizes;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OnDevices, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& each) { return c10::toString(each.param); });

}  // namespace
}  // namespace tessera::nn::fused_on_devices_test
