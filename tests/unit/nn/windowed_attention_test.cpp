// Attention with windows and sinks beside another way of writing it down.
#include "nn/windowed_attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "nn/attention.h"
#include "unit/nn/compare.h"

namespace tessera::nn {
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

// What lies before the window has no influence: neither on the result nor on gradients.
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
}  // namespace tessera::nn
