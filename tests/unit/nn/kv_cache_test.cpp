// Attention over cached keys and values against attention over the whole text.
#include "nn/attention.h"
#include "nn/parameter.h"
#include "tessera/error.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::kv_cache_test {
namespace {

struct Sizes {
  std::int64_t rows, groups, positions, repeat, head_dim;
};

// More positions than one block of queries (256), several query heads of a key head, several rows.
constexpr Sizes kSizes[] = {{1, 1, 1, 1, 4}, {2, 3, 9, 2, 8}, {1, 2, 300, 3, 16}};

struct Heads {
  at::Tensor q, k, v;
};

Heads draw(const Sizes& s, at::ScalarType dtype) {
  at::manual_seed(11);
  return {at::randn({s.rows, s.groups, s.positions, s.repeat, s.head_dim}).to(dtype),
          at::randn({s.rows, s.groups, s.positions, 1, s.head_dim}).to(dtype),
          at::randn({s.rows, s.positions, s.groups * s.head_dim}).to(dtype)};
}

/// The outputs of positions [from, end), computed over a cache that holds those before.
at::Tensor continued(const Heads& heads, std::int64_t from) {
  const std::int64_t positions = heads.q.size(2);
  KvCache cache(positions);
  cache.append(heads.k.narrow(2, 0, from), heads.v.narrow(1, 0, from));
  cache.append(heads.k.narrow(2, from, positions - from),
               heads.v.narrow(1, from, positions - from));
  return cached_attention(heads.q.narrow(2, from, positions - from), cache.keys(), cache.values(),
                          0.3);
}

TEST(CachedAttention, LaterPositionsSeeWhatTheWholeTextSees) {
  for (const Sizes& sizes : kSizes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const Heads heads = draw(sizes, dtype);
      const Heads wide{heads.q.to(at::kDouble), heads.k.to(at::kDouble), heads.v.to(at::kDouble)};
      const at::Tensor whole = causal_attention_composite(wide.q, wide.k, wide.v, 0.3);
      for (const std::int64_t from : {std::int64_t{0}, sizes.positions / 2, sizes.positions - 1}) {
        // bf16: one rounding of the softmax's weights, one of the result, of values below 1.
        const Bound bound = dtype == at::kBFloat16 ? Bound{1.0 / 128, 1.0 / 128} : kFloat32;
        expect_close(continued(heads, from), whole.narrow(1, from, sizes.positions - from), bound,
                     std::string(c10::toString(dtype)) + " from " + std::to_string(from));
      }
    }
  }
}

TEST(CausalAttention, WithoutGradientItHasTheSameBits) {
  for (const Sizes& sizes : kSizes) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Heads heads = draw(sizes, dtype);
      const at::Tensor with =
          causal_attention(heads.q.clone().requires_grad_(true), heads.k, heads.v, 0.3);
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(causal_attention(heads.q, heads.k, heads.v, 0.3).equal(with.detach()));
    }
  }
}

AttentionOptions small() {
  return {.hidden_size = 12,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 6,
          .qk_norm = AttentionOptions::QkNorm::kYes,
          .norm_eps = 1e-6};
}

TEST(Attention, DecodedTokenByTokenItEqualsForward) {
  at::manual_seed(3);
  Attention attention(small(), std::make_shared<Rope>(RopeOptions{}, 6));
  materialize(attention);
  for (const auto& item : attention.named_parameters()) item.value().data().normal_(0.0, 0.5);
  const at::Tensor x = at::randn({2, 7, 12});
  const at::Tensor expected = attention.forward(x).detach();
  for (const std::int64_t prompt : {1, 4, 7}) {
    KvCache cache(7);
    const at::Tensor first = attention.decode(x.narrow(1, 0, prompt), cache);
    if (prompt == 7) {
      EXPECT_TRUE(first.equal(expected)) << "a prompt has forward's bits";
    }
    expect_close(first, expected.narrow(1, 0, prompt), kFloat32, "prompt");
    for (std::int64_t t = prompt; t < 7; ++t) {
      expect_close(attention.decode(x.narrow(1, t, 1), cache), expected.narrow(1, t, 1), kFloat32,
                   "position " + std::to_string(t));
    }
    EXPECT_EQ(cache.length(), 7);
  }
}

TEST(KvCache, RefusesMoreThanItsRoomAndOtherShapes) {
  KvCache cache(3);
  cache.append(at::zeros({1, 2, 2, 1, 4}), at::zeros({1, 2, 8}));
  EXPECT_THROW(cache.append(at::zeros({1, 2, 2, 1, 4}), at::zeros({1, 2, 8})), Error);
  EXPECT_THROW(cache.append(at::zeros({2, 2, 1, 1, 4}), at::zeros({2, 1, 8})), Error);
  EXPECT_THROW(
      cache.append(at::zeros({1, 2, 1, 1, 4}, at::kBFloat16), at::zeros({1, 1, 8}, at::kBFloat16)),
      Error);
  EXPECT_EQ(cache.length(), 2);
  cache.append(at::ones({1, 2, 1, 1, 4}), at::ones({1, 1, 8}));
  EXPECT_EQ(cache.keys().sizes(), (at::IntArrayRef{1, 2, 3, 4}));
  EXPECT_EQ(cache.values().select(2, 2).sum().item<double>(), 8.0);
}

}  // namespace
}  // namespace tessera::nn::kv_cache_test
