// Attention with windows and sinks against another way of writing it down.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <limits>

#include "dist/held_bytes.h"
#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::windowed_attention_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class WindowedAttention : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(5); }
};

constexpr double kScale = 0.4;

/// q, keys, values of 2 key heads with 3 query heads each, and their sinks.
Tensors inputs(std::int64_t rows, std::int64_t queries, std::int64_t keys) {
  return {at::randn({rows, 2, queries, 3, 8}), at::randn({rows, 2, keys, 8}),
          at::randn({rows, 2, keys, 8}), at::randn({6})};
}

/// All scores at once, without a sink in any softmax: a head's weights are those without a sink
/// times sigmoid(log of their sum - sink).
at::Tensor at_once(const Tensors& in, std::optional<std::int64_t> window) {
  const at::Tensor& q = in[0];
  const std::int64_t queries = q.size(2);
  const std::int64_t keys = in[1].size(2);
  const at::Tensor scores = at::einsum("bgtrd,bgnd->bgrtn", {q, in[1]}) * kScale;
  const at::Tensor key = at::arange(keys).unsqueeze(0);
  const at::Tensor own = at::arange(keys - queries, keys).unsqueeze(1);
  at::Tensor hidden = key > own;
  if (window) hidden = hidden.logical_or(key <= own - *window);
  const at::Tensor masked = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  const at::Tensor sum = at::logsumexp(masked, {4}, /*keepdim=*/true);
  at::Tensor weights = at::exp(masked - sum);
  if (in.size() > 3) weights = weights * at::sigmoid(sum - in[3].view({1, 2, 3, 1, 1}));
  return at::einsum("bgrtn,bgnd->btgrd", {weights, in[2]}).reshape({q.size(0), queries, 2 * 3 * 8});
}

at::Tensor found(const Tensors& in, std::optional<std::int64_t> window) {
  return windowed_attention(in[0], in[1], in[2], {window, in.size() > 3 ? in[3] : at::Tensor()},
                            kScale);
}

// Windows shorter and longer than a block of queries, none, and queries that follow a cache.
TEST_F(WindowedAttention, IsTheSoftmaxOverWhatIsSeenAndTheSink) {
  struct Case {
    std::int64_t rows, queries, keys;
    std::optional<std::int64_t> window;
  };
  for (const Case& each :
       {Case{2, 7, 7, 3}, Case{1, 300, 300, 7}, Case{1, 600, 600, 300},
        Case{1, 300, 300, std::nullopt}, Case{1, 1, 40, 8}, Case{2, 3, 9, 1}, Case{0, 5, 5, 2}}) {
    const auto window = each.window;
    const Tensors in = inputs(each.rows, each.queries, each.keys);
    const std::string what = "queries " + std::to_string(each.queries) + ", window " +
                             std::to_string(window.value_or(0));
    expect_equals_composite([&](const Tensors& t) { return found(t, window); },
                            [&](const Tensors& t) { return at_once(t, window); }, in, {1e-6, 4e-6},
                            what);
    const Tensors without(in.begin(), in.begin() + 3);
    expect_equals_composite([&](const Tensors& t) { return found(t, window); },
                            [&](const Tensors& t) { return at_once(t, window); }, without,
                            {1e-6, 4e-6}, what + ", no sinks");
  }
}

TEST_F(WindowedAttention, ASinkOfMinusInfinityIsNone) {
  Tensors in = inputs(1, 9, 9);
  in[3].fill_(-std::numeric_limits<double>::infinity());
  const Tensors without(in.begin(), in.begin() + 3);
  EXPECT_TRUE(at::allclose(found(in, 4), found(without, 4), 1e-6, 1e-6));
}

struct Size {
  std::int64_t rows, groups, repeat, queries, keys, head_dim, value_dim;
  std::optional<std::int64_t> window;
};

/// One position and one key, fewer positions than the window, than a block and than sixteen;
/// windows of one key, of a block and of one key more or less; values narrower and wider than keys;
/// rows without end.
constexpr Size kOddSizes[] = {{1, 1, 1, 1, 1, 3, 5, std::nullopt},
                              {2, 3, 1, 1, 1, 4, 4, 1},
                              {1, 2, 3, 5, 5, 8, 2, 70},
                              {2, 1, 5, 37, 37, 6, 6, 1},
                              {1, 3, 2, 65, 65, 4, 4, 64},
                              {1, 2, 3, 130, 130, 5, 7, 63},
                              {2, 2, 1, 257, 257, 4, 4, 128},
                              {1, 1, 7, 300, 300, 4, 4, 17},
                              {1, 2, 2, 530, 530, 4, 4, 257},
                              {1, 2, 3, 513, 513, 4, 4, std::nullopt},
                              {2, 1, 3, 3, 80, 4, 4, 70},
                              {1, 2, 2, 70, 90, 4, 4, std::nullopt},
                              {0, 2, 2, 9, 9, 4, 4, 4}};

std::string text(const Size& size) {
  return "queries " + std::to_string(size.queries) + ", keys " + std::to_string(size.keys) +
         ", window " + std::to_string(size.window.value_or(0));
}

Tensors drawn(const Size& size, at::ScalarType dtype) {
  return {at::randn({size.rows, size.groups, size.queries, size.repeat, size.head_dim}).to(dtype),
          at::randn({size.rows, size.groups, size.keys, size.head_dim}).to(dtype),
          // As layers give them: [B, N, G, D] turned.
          at::randn({size.rows, size.keys, size.groups, size.value_dim}).to(dtype).transpose(1, 2),
          at::randn({size.groups * size.repeat}).to(dtype)};
}

Function fused(const Size& size) {
  return [size](const Tensors& in) { return found(in, size.window); };
}
Function composite(const Size& size) {
  return [size](const Tensors& in) {
    return windowed_attention_composite(
        in[0], in[1], in[2], {size.window, in.size() > 3 ? in[3] : at::Tensor()}, kScale);
  };
}

// fp64 has 2^-53 a rounding: what differs by more is another formula.
TEST_F(WindowedAttention, InDoubleIsTheCompositeForEverySize) {
  for (const Size& size : kOddSizes) {
    const Tensors in = drawn(size, at::kDouble);
    expect_equals_composite(fused(size), composite(size), in, {1e-12, 1e-12}, text(size));
    expect_equals_composite(fused(size), composite(size), Tensors(in.begin(), in.begin() + 3),
                            {1e-12, 1e-12}, text(size) + ", no sinks");
  }
}

// fp32: sums of up to some hundred products. bf16: all of that is fp32, then one rounding.
TEST_F(WindowedAttention, KernelsEqualTheCompositeForEverySize) {
  for (const Size& size : kOddSizes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const Bound bound = dtype == at::kFloat      ? Bound{2e-6, 4e-6}
                          : dtype == at::kBFloat16 ? Bound{1.0 / 256, 4e-6}
                                                   : Bound{1.0 / 2048, 4e-6};
      const Tensors in = drawn(size, dtype);
      const std::string what = text(size) + ", " + c10::toString(dtype);
      expect_equals_composite(fused(size), composite(size), in, bound, what);
      expect_equals_composite(fused(size), composite(size), Tensors(in.begin(), in.begin() + 3),
                              bound, what + ", no sinks");
    }
  }
}

// The gradient of a sink is a sum of terms of both signs: rounded to bf16 anywhere on the way it
// would be off by more than this bound.
TEST_F(WindowedAttention, GradientsOfNarrowSinksAreFp32) {
  for (const auto window : {std::optional<std::int64_t>(), {33}}) {
    const Size size{2, 2, 3, 300, 300, 8, 8, window};
    const Tensors in = drawn(size, at::kBFloat16);
    Tensors wide, leaves;
    for (const at::Tensor& tensor : in) {
      wide.push_back(tensor.to(at::kDouble).requires_grad_(true));
      leaves.push_back(tensor.clone().requires_grad_(true));
    }
    leaves[3].set_grad_dtype(std::nullopt);
    const at::Tensor grad = at::randn({2, 300, 48}).to(at::kBFloat16);
    found(leaves, window).backward(grad);
    composite(size)(wide).backward(grad.to(at::kDouble));
    EXPECT_EQ(leaves[3].grad().scalar_type(), at::kFloat);
    expect_close(leaves[3].grad(), wide[3].grad(), {1e-6, 4e-6}, text(size));
  }
}

// A rank that has some of the groups computes their part of the whole.
TEST_F(WindowedAttention, GroupsAreIndependent) {
  const Size size{2, 3, 2, 70, 70, 4, 4, 9};
  const Tensors in = drawn(size, at::kDouble);
  const at::Tensor grad = at::randn({2, 70, 3 * 2 * 4}, at::kDouble);
  const Tensors whole = run(fused(size), in, grad);
  const Tensors part = run(
      fused(size),
      {in[0].narrow(1, 1, 2), in[1].narrow(1, 1, 2), in[2].narrow(1, 1, 2), in[3].narrow(0, 2, 4)},
      grad.narrow(2, 8, 16));
  const Bound bound{1e-12, 1e-12};
  expect_close(part[0], whole[0].narrow(2, 8, 16), bound, "output");
  for (const std::size_t i : {1U, 2U, 3U}) {
    expect_close(part[i], whole[i].narrow(1, 1, 2), bound, "gradient " + std::to_string(i - 1));
  }
  expect_close(part[4], whole[4].narrow(0, 2, 4), bound, "sinks");
}

TEST_F(WindowedAttention, KeepsNothingButItsInputs) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const auto window : {std::optional<std::int64_t>(), {16}}) {
      Tensors in = drawn({2, 2, 3, 300, 300, 8, 8, window}, dtype);
      for (at::Tensor& tensor : in) tensor.requires_grad_(true);
      const test::HeldBytes counter;
      const at::Tensor out = found(in, window);
      EXPECT_TRUE(out.requires_grad());
      EXPECT_EQ(counter.bytes(), static_cast<std::int64_t>(out.nbytes()));
    }
  }
}

TEST_F(WindowedAttention, ThreadsDoNotChangeResults) {
  const int threads = at::get_num_threads();
  const Size size{2, 2, 3, 300, 300, 8, 8, 40};
  const Tensors in = drawn(size, at::kBFloat16);
  const at::Tensor grad = at::randn({2, 300, 48});
  at::set_num_threads(1);
  const Tensors one = run(fused(size), in, grad);
  at::set_num_threads(3);
  const Tensors three = run(fused(size), in, grad);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].equal(three[i])) << i;
}

TEST_F(WindowedAttention, WithoutAGraphTheBitsAreTheSame) {
  const Size size{1, 2, 3, 300, 300, 8, 8, 40};
  Tensors in = drawn(size, at::kFloat);
  const at::Tensor plain = found(in, size.window);
  in[0].requires_grad_(true);
  EXPECT_TRUE(found(in, size.window).detach().equal(plain));
}

TEST_F(WindowedAttention, SecondDerivativesAreRefused) {
  Tensors in = inputs(1, 5, 5);
  in[0].requires_grad_(true);
  EXPECT_THROW(found(in, 3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true),
               Error);
}

// Keys before the window have no influence: neither on the result nor on gradients.
TEST_F(WindowedAttention, KeysBeforeTheWindowHaveNoInfluence) {
  Tensors in = inputs(1, 1, 10);
  for (at::Tensor& tensor : in) tensor.requires_grad_(true);
  const at::Tensor out = found(in, 4);
  out.sum().backward();
  for (const std::size_t i : {1U, 2U}) {
    EXPECT_EQ(in[i].grad().narrow(2, 0, 6).abs().max().item<double>(), 0.0);
    EXPECT_GT(in[i].grad().narrow(2, 6, 1).abs().max().item<double>(), 0.0);
  }
}

}  // namespace
}  // namespace tessera::nn::windowed_attention_test
