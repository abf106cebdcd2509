// The kinds of rope that scale frequencies, and the one that turns neighbours.
#include "nn/rope.h"

#include <ATen/ATen.h>

#include <cmath>
#include <complex>
#include <random>

#include "nn/attention/attention.h"
#include "nn/parameter.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::rope_test {
namespace {

/// The rope of deepseek-v2.
RopeOptions deepseek() {
  return {.theta = 10000.0,
          .type = RopeType::kYarn,
          .factor = 40.0,
          .original_max_position_embeddings = 4096,
          .yarn = {.attention_factor = 1.0}};
}

/// The rope of gpt-oss.
RopeOptions gpt_oss() {
  return {.theta = 150000.0,
          .type = RopeType::kYarn,
          .factor = 32.0,
          .original_max_position_embeddings = 4096,
          .yarn = {.attention_factor = 1.3465735902799727, .truncate = false}};
}

/// The formula in fp64: f / factor (1 - e) + f e, e = 1 - clamp((i - low) / (high - low), 0, 1).
std::vector<double> exact(const RopeOptions& options, std::int64_t head_dim) {
  const YarnOptions& yarn = options.yarn;
  const auto dim = static_cast<double>(head_dim);
  const auto border = [&](double turns) {
    const double period = static_cast<double>(options.original_max_position_embeddings);
    return dim * std::log(period / (2 * M_PI * turns)) / (2 * std::log(options.theta));
  };
  double low = border(yarn.beta_fast);
  double high = border(yarn.beta_slow);
  if (yarn.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  std::vector<double> result;
  for (std::int64_t i = 0; i < head_dim / 2; ++i) {
    const double f = std::pow(options.theta, -2.0 * static_cast<double>(i) / dim);
    const double e = 1 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    result.push_back(f / options.factor * (1 - e) + f * e);
  }
  return result;
}

TEST(Rope, YarnsFrequenciesAreThoseOfTheFormula) {
  const std::pair<RopeOptions, std::int64_t> all[] = {
      {deepseek(), 64}, {gpt_oss(), 64}, {deepseek(), 8}};
  for (const auto& [options, head_dim] : all) {
    const at::Tensor found = inverse_frequencies(options, head_dim);
    const std::vector<double> expected = exact(options, head_dim);
    ASSERT_EQ(found.size(0), static_cast<std::int64_t>(expected.size()));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      // A handful of fp32 roundings; near the ramp's upper end 1 - e loses two more bits.
      EXPECT_NEAR(found[static_cast<std::int64_t>(i)].item<double>() / expected[i], 1.0, 2e-6) << i;
    }
  }
}

// From transformers 5.23, ROPE_INIT_FUNCTIONS["yarn"], printed with nine digits.
TEST(Rope, YarnsFrequenciesAreThoseOfTransformers) {
  const at::Tensor rounded = inverse_frequencies(deepseek(), 64);
  EXPECT_FLOAT_EQ(rounded[10].item<float>(), 0.0562341288F);
  EXPECT_FLOAT_EQ(rounded[11].item<float>(), 0.0390069261F);
  EXPECT_FLOAT_EQ(rounded[22].item<float>(), 0.00017782794F);
  EXPECT_FLOAT_EQ(rounded[31].item<float>(), 3.33380353e-06F);
  const at::Tensor whole = inverse_frequencies(gpt_oss(), 64);
  EXPECT_FLOAT_EQ(whole[8].item<float>(), 0.0508132726F);
  EXPECT_FLOAT_EQ(whole[9].item<float>(), 0.0317056961F);
  EXPECT_FLOAT_EQ(whole[17].item<float>(), 0.000129318694F);
  EXPECT_FLOAT_EQ(whole[18].item<float>(), 3.83088118e-05F);
}

TEST(Rope, TheFactorOfTheTablesIsTakenBeforeTheyAreRounded) {
  Rope rope(gpt_oss(), 64);
  RopeOptions options = gpt_oss();
  options.yarn.attention_factor = 1.0;
  Rope plain(options, 64);
  const at::Tensor cos = plain.table(50, at::kFloat, at::kCPU).cos * 1.3465735902799727;
  EXPECT_TRUE(rope.table(50, at::kFloat, at::kCPU).cos.equal(cos));
  EXPECT_TRUE(rope.table(50, at::kBFloat16, at::kCPU).cos.equal(cos.to(at::kBFloat16)));
  EXPECT_FLOAT_EQ(rope.table(50, at::kFloat, at::kCPU).sin[1][0].item<float>(),
                  1.3465735902799727F * std::sin(1.0F));
}

// Property: where a part of a head turns, the table is that of a head of the turned part's size,
// and leaves the rest as it is: factors of the kind are of the turned part only.
TEST(Rope, ATableOfAPartLeavesTheRestAsItIs) {
  std::mt19937_64 draw(20261128);
  const auto below = [&](std::uint64_t most) { return static_cast<double>(draw() % most); };
  for (int i = 0; i < 40; ++i) {
    constexpr RopeType kTypes[] = {RopeType::kDefault, RopeType::kLinear, RopeType::kLlama3,
                                   RopeType::kYarn};
    RopeOptions options{
        .theta = 1000.0 + below(100000),
        .type = kTypes[i % 4],
        .factor = 1.0 + below(32),
        .low_freq_factor = 1.0,
        .high_freq_factor = 4.0,
        .original_max_position_embeddings = 64 + static_cast<std::int64_t>(below(999))};
    if (draw() % 2 == 0) options.yarn.attention_factor = 0.5 + below(4);
    const std::int64_t head_dim = 8 * (1 + static_cast<std::int64_t>(below(8)));
    for (const double part : {0.25, 0.5, 0.75}) {
      const auto turned = static_cast<std::int64_t>(static_cast<double>(head_dim) * part);
      const RopeTable whole = Rope(options, turned).table(9, at::kFloat, at::kCPU);
      RopeOptions partly = options;
      partly.partial_rotary_factor = part;
      const RopeTable table = Rope(partly, head_dim).table(9, at::kFloat, at::kCPU);
      ASSERT_EQ(table.cos.size(1), head_dim / 2);
      const auto turns = [&](const at::Tensor& x) { return x.narrow(1, 0, turned / 2); };
      const auto rests = [&](const at::Tensor& x) {
        return x.narrow(1, turned / 2, (head_dim - turned) / 2);
      };
      EXPECT_TRUE(turns(table.cos).equal(whole.cos)) << i << " " << part;
      EXPECT_TRUE(turns(table.sin).equal(whole.sin)) << i << " " << part;
      EXPECT_TRUE(rests(table.cos).eq(1.0).all().item<bool>()) << i << " " << part;
      EXPECT_TRUE(rests(table.sin).eq(0.0).all().item<bool>()) << i << " " << part;
    }
  }
}

/// The rope of Phi-4-mini in small: three quarters of a head of 8.
RopeOptions phi4_mini() {
  return {.theta = 10000.0,
          .type = RopeType::kLongRope,
          .factor = 32.0,
          .original_max_position_embeddings = 16,
          .partial_rotary_factor = 0.75,
          .long_rope = LongRopeOptions{{1.0, 1.1, 1.7}, {1.3, 4.0, 20.0}}};
}

// Property: a row as long as the original context has the short factors, one position more the long
// ones at every position, for any tables that were asked for before.
TEST(Rope, LongRopeChoosesByTheLengthOfTheRow) {
  const RopeOptions options = phi4_mini();
  Rope rope(options, 8);
  const double scale = std::sqrt(1.0 + std::log(32.0) / std::log(16.0));
  for (const std::int64_t length : {16, 17, 3, 40, 16}) {
    const auto& factors =
        length > 16 ? options.long_rope->long_factor : options.long_rope->short_factor;
    const RopeTable table = rope.table(length, at::kDouble, at::kCPU);
    for (const std::int64_t t : {std::int64_t{0}, std::int64_t{2}, length - 1}) {
      for (std::int64_t i = 0; i < 3; ++i) {
        const double slow = factors[static_cast<std::size_t>(i)];
        const double angle =
            static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i) / 6.0) / slow;
        // Angles of at most 40 in fp32: some 40 * 2^-24.
        EXPECT_NEAR(table.cos[t][i].item<double>(), scale * std::cos(angle), 1e-5);
        EXPECT_NEAR(table.sin[t][i].item<double>(), scale * std::sin(angle), 1e-5);
      }
      EXPECT_EQ(table.cos[t][3].item<double>(), 1.0) << "what does not turn has no factor";
    }
  }
  // A text that has come so far has the table of rows of its length.
  EXPECT_TRUE(rope.table(40, 16, at::kFloat, at::kCPU)
                  .cos.narrow(0, 0, 16)
                  .equal(rope.table(16, at::kFloat, at::kCPU).cos));
}

// Property: the order of pairs is one of the same elements, in which those that turn come in pairs
// half a head apart.
TEST(Rope, PairsOfAPartStandHalfAHeadApart) {
  for (const std::int64_t head_dim : {8, 12, 16}) {
    for (std::int64_t turned = 2; turned < head_dim; turned += 2) {
      const at::Tensor x = at::arange(3 * head_dim).view({1, 1, 3 * head_dim});
      const at::Tensor ordered = pairs_of_part(x, 3, turned).view({3, head_dim});
      for (std::int64_t i = 0; i < turned / 2; ++i) {
        EXPECT_EQ(ordered[1][i].item<std::int64_t>(), head_dim + i);
        EXPECT_EQ(ordered[1][i + head_dim / 2].item<std::int64_t>(), head_dim + i + turned / 2);
      }
      EXPECT_TRUE(std::get<0>(ordered.flatten().sort()).equal(x.flatten()));
    }
  }
}

TEST(Rope, NeighboursTurnAsComplexNumbersAndStayInPlace) {
  at::manual_seed(3);
  Rope rope(deepseek(), 64);
  const RopeTable table = rope.table(7, at::kFloat, at::kCPU);
  const at::Tensor x = at::randn({2, 7, 3, 64}, at::kDouble);
  const at::Tensor turned = rotate_interleaved(x, table);
  ASSERT_EQ(turned.sizes(), x.sizes());
  for (const std::int64_t t : {0, 1, 6}) {
    for (const std::int64_t i : {0, 5, 31}) {
      const auto at = [&](const at::Tensor& y) {
        const at::Tensor head = y[1][t][2];
        return std::complex<double>(head[2 * i].item<double>(), head[2 * i + 1].item<double>());
      };
      const std::complex<double> turn(table.cos[t][i].item<double>(),
                                      table.sin[t][i].item<double>());
      EXPECT_LT(std::abs(at(turned) - at(x) * turn), 1e-14) << t << " " << i;
    }
  }
}

TEST(Rope, NeighboursAreTurnedInFloat32AndRoundedOnce) {
  at::manual_seed(4);
  Rope rope(deepseek(), 64);
  const RopeTable table = rope.table(9, at::kFloat, at::kCPU);
  const auto turn = [&](const std::vector<at::Tensor>& in) {
    return rotate_interleaved(in[0], table);
  };
  for (const std::int64_t rows : {0, 2}) {
    const at::Tensor x = at::randn({rows, 9, 2, 64});
    expect_equals_composite(turn, turn, {x}, kFloat32, "float");
    expect_equals_composite(turn, turn, {x.to(at::kBFloat16)}, kOneBFloat16Rounding, "bfloat16");
  }
}

// Attention over cached keys and values against attention over the whole text.

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
}  // namespace tessera::nn::rope_test
