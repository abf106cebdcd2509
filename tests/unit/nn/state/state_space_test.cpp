// The chunked state-space dual against the recurrence of its definition in fp64: outputs,
// gradients, packed rows, decoding and memory.
#include "nn/state/state_space.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <random>

#include "dist/held_bytes.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::nn::state_space_test {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Case {
  std::int64_t rows, positions, groups, of_group, head_dim, state, chunk;
  double dt = 0.3;  ///< the largest
  double a = 4;     ///< the largest, of -a
  bool packed = false;
  std::int64_t heads() const { return groups * of_group; }
};

std::string to_string(const Case& each) {
  return c10::str("B", each.rows, " T", each.positions, " G", each.groups, " R", each.of_group,
                  " P", each.head_dim, " N", each.state, " chunk ", each.chunk,
                  each.packed ? ", packed" : "");
}

/// x, dt, a, b, c, d.
Tensors inputs(const Case& each, at::ScalarType dtype = at::kFloat) {
  const std::int64_t B = each.rows, T = each.positions, H = each.heads();
  return {at::randn({B, T, H, each.head_dim}).to(dtype),
          at::rand({B, T, H}) * each.dt,
          -each.a * at::linspace(0.05, 1, H),
          at::randn({B, T, each.groups, each.state}).to(dtype),
          at::randn({B, T, each.groups, each.state}).to(dtype),
          at::randn({H})};
}

at::Tensor drawn_starts(std::mt19937_64& random, std::int64_t rows, std::int64_t positions) {
  if (rows == 0) return at::zeros({0, positions}, at::kLong);
  return packed::documents_of(packed::drawn_rows(random, rows, positions)).starts;
}

/// The definition, position by position. Differentiable.
at::Tensor recurrence(const Tensors& in, const at::Tensor& starts) {
  const at::Tensor &x = in[0], &dt = in[1], &a = in[2], &d = in[5];
  const std::int64_t of_group = x.size(2) / in[3].size(2);
  const at::Tensor b = in[3].repeat_interleave(of_group, 2),
                   c = in[4].repeat_interleave(of_group, 2);
  at::Tensor state = at::zeros({x.size(0), x.size(2), x.size(3), b.size(3)}, x.options());
  Tensors outputs;
  for (std::int64_t t = 0; t < x.size(1); ++t) {
    const at::Tensor step = dt.select(1, t);
    at::Tensor kept = at::exp(step * a);
    if (starts.defined()) kept = kept * (starts.select(1, t) < t).to(kept.dtype()).unsqueeze(1);
    state = state * kept.unsqueeze(-1).unsqueeze(-1) +
            (step.unsqueeze(-1) * x.select(1, t)).unsqueeze(-1) * b.select(1, t).unsqueeze(2);
    outputs.push_back((state * c.select(1, t).unsqueeze(2)).sum(-1) +
                      x.select(1, t) * d.unsqueeze(-1));
  }
  return at::stack(outputs, 1);
}

at::Tensor found(const Tensors& in, std::int64_t chunk, const at::Tensor& starts) {
  return state_space({in[0], in[1], in[2], in[3], in[4], in[5]}, chunk, {starts});
}

/// A sum of n terms in fp32 differs by about sqrt(n) roundings of 2^-24 of its largest part, and a
/// few follow each other (weights, outputs, states, gradients), that of `a` over all pairs of
/// positions with parts of both signs: 128 in all.
const Bound kFloat32Sums{4e-7, 128.0 / (1 << 24)};

void expect_equals_recurrence(const Case& each, const Bound& bound, at::ScalarType dtype,
                              std::mt19937_64& random) {
  const at::Tensor starts =
      each.packed ? drawn_starts(random, each.rows, each.positions) : at::Tensor();
  expect_equals_composite([&](const Tensors& in) { return found(in, each.chunk, starts); },
                          [&](const Tensors& in) { return recurrence(in, starts); },
                          inputs(each, dtype), bound, to_string(each));
}

class StateSpace : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
  std::mt19937_64 random_{11};
};

// Draws rows (none, too), groups, sizes, chunks that do not divide, longer ones than the row, one
// position.
TEST_F(StateSpace, IsTheRecurrence) {
  for (const bool packed : {false, true}) {
    for (const Case& each :
         {Case{2, 70, 2, 3, 8, 5, 16}, Case{1, 64, 1, 4, 4, 16, 32}, Case{1, 45, 3, 1, 6, 4, 64},
          Case{3, 1, 2, 2, 4, 4, 8}, Case{0, 9, 2, 2, 4, 4, 4}, Case{2, 33, 2, 2, 1, 1, 1},
          Case{1, 90, 2, 2, 8, 8, 45}}) {
      Case drawn = each;
      drawn.packed = packed;
      expect_equals_recurrence(drawn, kFloat32Sums, at::kFloat, random_);
    }
  }
}

TEST_F(StateSpace, OfDrawnSizesIsTheRecurrence) {
  const auto drawn = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most));
  };
  for (int number = 0; number < 12; ++number) {
    const Case each{.rows = drawn(3),
                    .positions = drawn(60),
                    .groups = drawn(3),
                    .of_group = drawn(3),
                    .head_dim = drawn(8),
                    .state = drawn(8),
                    .chunk = drawn(40),
                    .packed = number % 2 == 0};
    expect_equals_recurrence(each, kFloat32Sums, at::kFloat, random_);
  }
}

// Nothing but the order of additions is left between the two in fp64.
TEST_F(StateSpace, OfFloat64IsTheRecurrenceToItsRounding) {
  for (const bool packed : {false, true}) {
    const Case each{.rows = 2,
                    .positions = 50,
                    .groups = 2,
                    .of_group = 2,
                    .head_dim = 4,
                    .state = 6,
                    .chunk = 12,
                    .packed = packed};
    Tensors in = inputs(each);
    for (at::Tensor& tensor : in) tensor = tensor.to(at::kDouble);
    const at::Tensor starts = packed ? drawn_starts(random_, 2, 50) : at::Tensor();
    expect_equals_composite([&](const Tensors& t) { return found(t, 12, starts); },
                            [&](const Tensors& t) { return recurrence(t, starts); }, in,
                            {1e-14, 1e-13}, packed ? "packed" : "whole");
  }
}

// Inputs are rounded before both; the output and the gradients of x, b and c are rounded once.
TEST_F(StateSpace, OfBFloat16IsRoundedOnce) {
  for (const bool packed : {false, true}) {
    const Case each{.rows = 2,
                    .positions = 70,
                    .groups = 2,
                    .of_group = 2,
                    .head_dim = 8,
                    .state = 8,
                    .chunk = 32,
                    .packed = packed};
    expect_equals_recurrence(each, {kOneBFloat16Rounding.relative, kFloat32Sums.absolute},
                             at::kBFloat16, random_);
  }
}

// Decays from earlier to later positions are below e^-200 here, those the other way would be
// infinite; what is left of a state is 0 in fp32.
TEST_F(StateSpace, OfDecaysThatLeaveNothingIsFinite) {
  const Case each{.rows = 1,
                  .positions = 40,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 4,
                  .state = 4,
                  .chunk = 16,
                  .dt = 8,
                  .a = 300};
  Tensors in = inputs(each);
  in[1].add_(4);
  in[2].fill_(-300);
  expect_equals_composite([&](const Tensors& t) { return found(t, 16, {}); },
                          [&](const Tensors& t) { return recurrence(t, {}); }, in, kFloat32Sums,
                          "strong decay");
}

// Decays of e^-1000 at three positions, weak ones everywhere else: a sum that is large by then does
// not hide them.
TEST_F(StateSpace, OfWeakDecaysBehindAStrongOneKeepsTheirPrecision) {
  const Case each{.rows = 1,
                  .positions = 48,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 4,
                  .state = 4,
                  .chunk = 24,
                  .dt = 0.05,
                  .a = 1};
  Tensors in = inputs(each);
  in[2].fill_(-1);
  for (const std::int64_t strong : {0, 5, 30}) in[1].select(1, strong).fill_(1000);
  expect_equals_composite([&](const Tensors& t) { return found(t, 24, {}).slice(1, 6, 30); },
                          [&](const Tensors& t) { return recurrence(t, {}).slice(1, 6, 30); }, in,
                          kFloat32Sums, "a strong decay before weak ones");
}

// In a chunk with a border and behind chunks without one: bits, since a hidden pair weighs 0.
TEST_F(StateSpace, WhatIsBeforeABorderIsNotSeen) {
  const Case each{.rows = 2,
                  .positions = 60,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 4,
                  .state = 4,
                  .chunk = 16};
  for (const std::int64_t border : {5, 16, 31, 47}) {
    const at::Tensor starts = at::zeros({2, 60}, at::kLong);
    starts.narrow(1, border, 60 - border).fill_(border);
    Tensors in = inputs(each);
    const at::Tensor before = found(in, 16, starts);
    for (const std::size_t changed : {0UL, 3UL, 4UL}) in[changed].narrow(1, 0, border).mul_(-100);
    const at::Tensor after = found(in, 16, starts);
    EXPECT_TRUE(
        at::equal(before.narrow(1, border, 60 - border), after.narrow(1, border, 60 - border)))
        << border;
    EXPECT_FALSE(at::equal(before.narrow(1, 0, border), after.narrow(1, 0, border))) << border;
    EXPECT_FALSE(at::equal(after.narrow(1, border, 60 - border),
                           found(in, 16, {}).narrow(1, border, 60 - border)))
        << border;
  }
}

TEST_F(StateSpace, OfPackedRowsIsThatOfTheirDocuments) {
  const Case each{.rows = 1,
                  .positions = 100,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 8,
                  .state = 8,
                  .chunk = 32};
  const std::vector<std::int64_t> lengths{3, 40, 1, 20, 36};
  const Tensors in = inputs(each);
  Tensors parts, starts;
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    Tensors alone = in;
    for (const std::size_t packed : {0UL, 1UL, 3UL, 4UL})
      alone[packed] = in[packed].narrow(1, begin, length);
    parts.push_back(found(alone, 32, {}));
    starts.push_back(at::full({1, length}, begin, at::kLong));
    begin += length;
  }
  expect_close(found(in, 32, at::cat(starts, 1)), at::cat(parts, 1), kFloat32Sums, "packed");
}

// A prompt, then one position and several at a time.
TEST_F(StateSpace, InStepsIsTheWhole) {
  const Case each{.rows = 2,
                  .positions = 50,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 8,
                  .state = 8,
                  .chunk = 16};
  const Tensors in = inputs(each);
  at::Tensor state;
  Tensors parts;
  std::int64_t begin = 0;
  for (const std::int64_t length : {21, 1, 1, 17, 1, 9}) {
    const auto part = [&](std::size_t input) { return in[input].narrow(1, begin, length); };
    parts.push_back(
        state_space_after({part(0), part(1), in[2], part(3), part(4), in[5]}, 16, state));
    EXPECT_EQ(state.sizes(), at::IntArrayRef({2, 4, 8, 8}));
    begin += length;
  }
  ASSERT_EQ(begin, each.positions);
  expect_close(at::cat(parts, 1), found(in, 16, {}), kFloat32Sums, "in steps");
}

TEST_F(StateSpace, WithoutGradientGivesTheSameBits) {
  const Case each{.rows = 2,
                  .positions = 50,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 8,
                  .state = 8,
                  .chunk = 16};
  Tensors in = inputs(each);
  const at::Tensor starts = drawn_starts(random_, 2, 50);
  in[0].requires_grad_(true);
  const at::Tensor with = found(in, 16, starts);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(with, found(in, 16, starts)));
}

// Keeps one state a chunk but the last in addition to the output; nothing of [L, L].
TEST_F(StateSpace, KeepsOneStateAChunk) {
  const Case each{.rows = 1,
                  .positions = 256,
                  .groups = 2,
                  .of_group = 2,
                  .head_dim = 8,
                  .state = 16,
                  .chunk = 32};
  Tensors in = inputs(each);
  in[0].requires_grad_(true);
  const test::HeldBytes counter;
  const at::Tensor y = found(in, each.chunk, {});
  const std::int64_t floats = y.numel() + 7 * each.heads() * each.head_dim * each.state;
  EXPECT_EQ(counter.bytes(), 4 * floats);
}

TEST_F(StateSpace, RefusesASecondDerivative) {
  Tensors in = inputs({.rows = 1,
                       .positions = 5,
                       .groups = 1,
                       .of_group = 1,
                       .head_dim = 2,
                       .state = 2,
                       .chunk = 4});
  in[0].requires_grad_(true);
  EXPECT_THROW(found(in, 4, {}).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true),
               Error);
}

}  // namespace
}  // namespace tessera::nn::state_space_test
