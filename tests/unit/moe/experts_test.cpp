// Experts against one token at a time in fp64.
#include "moe/experts.h"

#include <limits>

#include "moe/expert_adapter.h"
#include "moe/routing.h"
#include "nn/mlp.h"
#include "nn/parameter.h"
#include "support/test.h"
#include "unit/moe/host_waits.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"
#include "unit/nn/left_out.h"

namespace tessera::moe::experts_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class Experts : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(13); }
};

constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kHidden = 12;
constexpr std::int64_t kInner = 7;

const ExpertOptions kGeglu{.activation = of_halves(nn::geglu)};

/// [M, 2] ascending; expert 3 is never chosen.
at::Tensor choice(std::int64_t tokens) {
  const at::Tensor all = at::tensor({0, 1, 1, 4, 0, 4, 2, 4, 0, 2, 1, 2}, at::kLong).view({6, 2});
  return all.repeat({(tokens + 5) / 6, 1}).narrow(0, 0, tokens);
}

/// Computes the result of experts() token by token and slot by slot.
at::Tensor one_by_one(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights) {
  Tensors tokens;
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    at::Tensor sum = at::zeros({x.size(1)}, x.options());
    for (std::int64_t k = 0; k < routing.indices.size(1); ++k) {
      const std::int64_t e = routing.indices[t][k].item<std::int64_t>();
      const Tensors both = at::mv(weights.gate_up[e], x[t]).chunk(2, 0);
      sum = sum + at::mv(weights.down[e], nn::geglu(both[0], both[1])) * routing.weights[t][k];
    }
    tokens.push_back(sum);
  }
  return at::stack(tokens);
}

Routing routing_of(const at::Tensor& weights) { return {choice(weights.size(0)), weights, {}}; }

TEST_F(Experts, EqualTokenByTokenWithAllGradients) {
  const auto fused = [](const Tensors& in) {
    return experts(in[0], routing_of(in[1]), {in[2], in[3]}, kGeglu);
  };
  const auto composite = [](const Tensors& in) {
    return one_by_one(in[0], routing_of(in[1]), {in[2], in[3]});
  };
  for (const std::int64_t tokens : {1, 6, 23}) {
    const Tensors inputs{at::randn({tokens, kHidden}), at::rand({tokens, 2}),
                         at::randn({kExperts, 2 * kInner, kHidden}),
                         at::randn({kExperts, kHidden, kInner})};
    nn::expect_equals_composite(fused, composite, inputs, nn::kFloat32,
                                std::to_string(tokens) + " tokens");
  }
}

TEST_F(Experts, AnExpertWithoutTokensHasZerosAsGradient) {
  const at::Tensor gate_up = at::randn({kExperts, 2 * kInner, kHidden}).requires_grad_(true);
  const at::Tensor down = at::randn({kExperts, kHidden, kInner}).requires_grad_(true);
  experts(at::randn({6, kHidden}), routing_of(at::rand({6, 2})), {gate_up, down}, kGeglu)
      .sum()
      .backward();
  EXPECT_EQ(gate_up.grad()[3].abs().max().item<double>(), 0.0);
  EXPECT_EQ(down.grad()[3].abs().max().item<double>(), 0.0);
  EXPECT_GT(down.grad()[2].abs().max().item<double>(), 0.0);
}

TEST_F(Experts, NoTokensRunForwardAndBackward) {
  const at::Tensor x = at::randn({0, kHidden}).requires_grad_(true);
  const at::Tensor gate_up = at::randn({kExperts, 2 * kInner, kHidden}).requires_grad_(true);
  const at::Tensor down = at::randn({kExperts, kHidden, kInner}).requires_grad_(true);
  const at::Tensor out = experts(x, routing_of(at::empty({0, 2})), {gate_up, down}, kGeglu);
  EXPECT_EQ(out.sizes(), x.sizes());
  out.sum().backward();
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(gate_up.grad().abs().max().item<double>(), 0.0);
}

// Experts without tokens have zeros, all of them together have nothing where the loss lacks them.
TEST_F(Experts, LeftOutOfTheLossGiveNoGradient) {
  for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
    nn::expect_left_out(
        [score](const Tensors& in) {
          return experts(in[0], routing_of(in[1]), {in[2], in[3]},
                         {.activation = kGeglu.activation, .score = score});
        },
        {at::randn({6, kHidden}), at::rand({6, 2}), at::randn({kExperts, 2 * kInner, kHidden}),
         at::randn({kExperts, kHidden, kInner})},
        score == Score::kAfterExperts ? "scored after" : "scored before");
  }
}

// 256 + 1 is not a bf16: sums that are rounded on the way give 0.
TEST_F(Experts, ATokensRowsAreAddedBeforeTheyAreRounded) {
  const at::Tensor rows = at::tensor({256.0, 1.0, -256.0}).to(at::kBFloat16).view({3, 1});
  const Dispatch order = dispatch(at::tensor({0, 1, 2}, at::kLong).view({1, 3}), kExperts);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    EXPECT_EQ(combine(rows, at::ones({1, 3}, dtype), order).item<double>(), 1.0);
  }
  EXPECT_EQ(combine(rows, {}, order).item<double>(), 1.0);
}

TEST_F(Experts, ProductsAndSumsAreWideAndRoundedOnce) {
  const Dispatch order = dispatch(choice(6), kExperts);
  const at::Tensor rows = at::randn({12, 4}).to(at::kBFloat16);
  const at::Tensor by_slot = rows.index_select(0, order.row_of_slot).view({6, 2, 4}).to(at::kFloat);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor weights = at::rand({6, 2}).to(dtype);
    const at::Tensor parts = by_slot * weights.to(at::kFloat).unsqueeze(2);
    const at::Tensor sum = parts.select(1, 0) + parts.select(1, 1);
    EXPECT_TRUE(combine(rows, weights, order).equal(sum.to(at::kBFloat16)));
    const at::Tensor scaled = parts.view({12, 4}).index_select(0, order.slot_of_row);
    EXPECT_TRUE(scale_rows(rows, weights, order).equal(scaled.to(at::kBFloat16)));
  }
}

// More rows than one block of them holds: what a token gets is what it gets alone.
TEST_F(Experts, BlocksOfRowsHaveTheBitsOfASingleToken) {
  constexpr std::int64_t kTokens = 70;
  constexpr std::int64_t kWide = 8192;  // 32 rows a block
  const at::Tensor grad = at::randn({kTokens, kWide});
  for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
    const auto results = [&](const at::Tensor& x, const at::Tensor& weights,
                             const at::Tensor& indices, const at::Tensor& of_result) {
      const Dispatch order = dispatch(indices, kExperts);
      return nn::run(
          [&](const Tensors& in) {
            const at::Tensor rows = gather_tokens(in[0], order);
            return score == Score::kAfterExperts
                       ? combine(rows, in[1], order)
                       : combine(scale_rows(rows, in[1], order), {}, order);
          },
          {x, weights}, of_result);
    };
    const at::Tensor x = at::randn({kTokens, kWide});
    const at::Tensor weights = at::rand({kTokens, 2});
    const Tensors all = results(x, weights, choice(kTokens), grad);
    for (const std::int64_t t : {0, 31, 32, 69}) {
      const auto of = [&](const at::Tensor& tensor) { return tensor.narrow(0, t, 1); };
      const Tensors one = results(of(x), of(weights), of(choice(kTokens)), of(grad));
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(of(all[i]).equal(one[i])) << "token " << t << ", result " << i;
      }
    }
  }
}

/// gpt-oss's experts, scored before or after, in plain autograd.
at::Tensor with_biases(const Tensors& in, Score score) {
  const Routing routing = routing_of(in[1]);
  Tensors tokens;
  for (std::int64_t t = 0; t < in[0].size(0); ++t) {
    at::Tensor sum = at::zeros({kHidden}, in[0].options());
    for (std::int64_t k = 0; k < 2; ++k) {
      const std::int64_t e = routing.indices[t][k].item<std::int64_t>();
      const at::Tensor weight = in[1][t][k];
      const bool before = score == Score::kBeforeExperts;
      const at::Tensor x = before ? in[0][t] * weight : in[0][t];
      const at::Tensor both = at::mv(in[2][e].t(), x) + in[4][e];
      const at::Tensor inner = nn::clamped_swiglu_composite(both, {1.702, 1.5});
      const at::Tensor y = at::mv(in[3][e].t(), inner) + in[5][e];
      sum = sum + (before ? y : y * weight);
    }
    tokens.push_back(sum);
  }
  return at::stack(tokens);
}

TEST_F(Experts, BiasesTransposedWeightsAndBothPlacesOfTheScoreEqualTokenByToken) {
  for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
    const auto fused = [&](const Tensors& in) {
      ExpertOptions options;
      options.activation = [](const at::Tensor& both) {
        return nn::clamped_swiglu(both, {1.702, 1.5});
      };
      options.score = score;
      return experts(in[0], routing_of(in[1]),
                     {in[2], in[3], in[4], in[5], nn::GroupLayout::kInOut}, options);
    };
    const auto composite = [&](const Tensors& in) { return with_biases(in, score); };
    for (const std::int64_t tokens : {1, 6, 23}) {
      const Tensors inputs{at::randn({tokens, kHidden}).to(at::kDouble),
                           at::rand({tokens, 2}).to(at::kDouble),
                           at::randn({kExperts, kHidden, 2 * kInner}).to(at::kDouble),
                           at::randn({kExperts, kInner, kHidden}).to(at::kDouble),
                           at::randn({kExperts, 2 * kInner}).to(at::kDouble),
                           at::randn({kExperts, kHidden}).to(at::kDouble)};
      nn::expect_equals_composite(fused, composite, inputs, {1e-13, 1e-14},
                                  std::to_string(tokens) + " tokens");
    }
  }
}

TEST_F(Experts, RowsAreOrderedByExpertThenToken) {
  const Dispatch order = dispatch(choice(6), kExperts);
  EXPECT_EQ(order.offsets, (nn::GroupOffsets{0, 3, 6, 9, 9, 12}));
  EXPECT_TRUE(
      order.slot_of_row.equal(at::tensor({0, 4, 8, 1, 2, 10, 6, 9, 11, 3, 5, 7}, at::kLong)));
  EXPECT_TRUE(order.slot_of_row.index_select(0, order.row_of_slot).equal(at::arange(12)));
}

TEST_F(Experts, ScoresThatAreNotFiniteEndTheCall) {
  const at::Tensor scores = at::zeros({6, kExperts});
  scores[2][1] = std::numeric_limits<float>::quiet_NaN();
  const Routing routing = route(scores, {.experts_per_token = 2});
  EXPECT_REFUSED(
      kNumeric,
      experts(at::randn({6, kHidden}), routing,
              {at::randn({kExperts, 2 * kInner, kHidden}), at::randn({kExperts, kHidden, kInner})},
              kGeglu),
      "(token 2, expert 1: nan)");
}

TEST_F(Experts, TheHostReadsOnceFromTheScoresToTheGradients) {
  const at::Tensor scores = at::randn({6, kExperts}).requires_grad_(true);
  const at::Tensor x = at::randn({6, kHidden}).requires_grad_(true);
  const at::Tensor gate_up = at::randn({kExperts, 2 * kInner, kHidden}).requires_grad_(true);
  const at::Tensor down = at::randn({kExperts, kHidden, kInner}).requires_grad_(true);
  for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
    ExpertOptions options = kGeglu;
    options.score = score;
    const HostWaits waits;
    const Routing routing = route(scores, {.experts_per_token = 2, .normalize = true});
    const at::Tensor load = count_load(routing.indices, kExperts);
    experts(x, routing, {gate_up, down}, options).sum().backward();
    EXPECT_EQ(waits.reads(), 1);
    EXPECT_EQ(waits.others(), 0);
    EXPECT_EQ(load.sum().item<std::int64_t>(), 12);
    EXPECT_EQ(waits.others(), 1) << "who looks is seen";
  }
}

// Adapters with the products of experts, against one expert after the other in fp64.
using nn::kFloat32;
using nn::kOneBFloat16Rounding;

constexpr double kScale = 1.5;
constexpr std::int64_t kAdapted = 4;

class ExpertAdapters : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

/// Expert 2 has no rows.
nn::GroupOffsets offsets(std::int64_t rows) { return {0, rows / 4, rows / 2, rows / 2, rows}; }

/// base, x, a, b.
at::Tensor adapted(const Tensors& in) {
  return add_expert_adapter(in[0], in[1], {in[2], in[3], kScale}, {offsets(in[1].size(0))});
}

at::Tensor adapted_one_by_one(const Tensors& in) {
  const nn::GroupOffsets begins = offsets(in[1].size(0));
  Tensors parts;
  for (std::int64_t e = 0; e < kAdapted; ++e) {
    const auto of = static_cast<std::size_t>(e);
    const at::Tensor x = in[1].slice(0, begins[of], begins[of + 1]);
    const at::Tensor both = at::matmul(at::matmul(x, in[2][e].t()), in[3][e].t());
    parts.push_back(in[0].slice(0, begins[of], begins[of + 1]) + both * kScale);
  }
  return at::cat(parts);
}

TEST_F(ExpertAdapters, EqualEachExpertAloneInFloat64WithAllGradients) {
  for (const std::int64_t rank : {3, 4}) {  // whose strides libtorch's product takes, and not
    for (const std::int64_t rows : {0, 1, 40}) {
      SCOPED_TRACE(std::to_string(rows) + " rows, rank " + std::to_string(rank));
      nn::expect_equals_composite(adapted, adapted_one_by_one,
                                  {at::randn({rows, 8}), at::randn({rows, 12}),
                                   at::randn({kAdapted, rank, 12}), at::randn({kAdapted, 8, rank})},
                                  kFloat32, "float");
    }
  }
}

TEST_F(ExpertAdapters, AddedToABFloat16ProductAreRoundedOnce) {
  nn::expect_equals_composite(
      adapted, adapted_one_by_one,
      {at::randn({40, 8}).to(at::kBFloat16), at::randn({40, 12}).to(at::kBFloat16),
       at::randn({kAdapted, 4, 12}), at::randn({kAdapted, 8, 4})},
      kOneBFloat16Rounding, "bfloat16");
}

TEST_F(ExpertAdapters, AnExpertWithoutRowsHasZerosAsGradient) {
  const at::Tensor a = at::randn({kAdapted, 4, 12}).requires_grad_(true);
  const at::Tensor b = at::randn({kAdapted, 8, 4}).requires_grad_(true);
  adapted({at::randn({40, 8}), at::randn({40, 12}), a, b}).sum().backward();
  for (const at::Tensor& grad : {a.grad(), b.grad()}) {
    EXPECT_EQ(grad[2].abs().max().item<double>(), 0.0);
    EXPECT_GT(grad[1].abs().max().item<double>(), 0.0);
  }
}

/// Returns the sum of the layer where W + scale * B A replaces W.
at::Tensor merged(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                  nn::GroupLayout layout) {
  const at::Tensor delta = at::matmul(b, a) * kScale;
  return weight + (layout == nn::GroupLayout::kOutIn ? delta : delta.transpose(1, 2));
}

// Frozen weights, biases, both layouts, both places of the score: what the layer computes, and the
// gradients of tokens, scores and factors, are those of merged weights.
TEST_F(ExpertAdapters, OfFrozenExpertsEqualMergedWeights) {
  constexpr std::int64_t kNarrow = 8, kRank = 4;
  // Sums of products stay near 1, since gelu's derivative in fp32 loses digits where its input is
  // large.
  constexpr double kWeights = 0.3, kFactors = 0.4;
  const at::Tensor indices =
      at::tensor({0, 1, 1, 3, 0, 3, 1, 3, 0, 1}, at::kLong).view({5, 2});  // expert 2: none
  for (const auto layout : {nn::GroupLayout::kOutIn, nn::GroupLayout::kInOut}) {
    for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
      const bool out_in = layout == nn::GroupLayout::kOutIn;
      const auto matrices = [&](std::int64_t out, std::int64_t in) {
        return kWeights *
               (out_in ? at::randn({kAdapted, out, in}) : at::randn({kAdapted, in, out}));
      };
      const at::Tensor gate_up = matrices(2 * kNarrow, kHidden), down = matrices(kHidden, kNarrow);
      const at::Tensor gate_up_bias = kWeights * at::randn({kAdapted, 2 * kNarrow});
      const at::Tensor down_bias = kWeights * at::randn({kAdapted, kHidden});
      const ExpertOptions options{.activation = of_halves(nn::geglu), .score = score};
      const auto with_adapters = [&](const Tensors& in) {
        return experts(in[0], {indices, in[1], {}},
                       {gate_up,
                        down,
                        gate_up_bias,
                        down_bias,
                        layout,
                        {in[2], in[3], kScale},
                        {in[4], in[5], kScale}},
                       options);
      };
      const auto truth = [&](const Tensors& in) {
        const auto wide = [](const at::Tensor& of) { return of.to(at::kDouble); };
        return experts(
            in[0], {indices, in[1], {}},
            {merged(wide(gate_up), in[2], in[3], layout), merged(wide(down), in[4], in[5], layout),
             wide(gate_up_bias), wide(down_bias), layout},
            options);
      };
      nn::expect_equals_composite(with_adapters, truth,
                                  {at::randn({5, kHidden}), at::rand({5, 2}),
                                   kFactors * at::randn({kAdapted, kRank, kHidden}),
                                   kFactors * at::randn({kAdapted, 2 * kNarrow, kRank}),
                                   kFactors * at::randn({kAdapted, kRank, kNarrow}),
                                   kFactors * at::randn({kAdapted, kHidden, kRank})},
                                  kFloat32, out_in ? "out, in" : "in, out");
    }
  }
}

TEST_F(ExpertAdapters, HoldTheirFactorsAndBeginWithoutData) {
  const ExpertAdapter adapter({.experts = 4, .in = 12, .out = 8, .rank = 3}, {}, 2.0);
  const auto parameters = adapter.named_parameters();
  EXPECT_THAT(parameters.keys(), ElementsAre("lora_A.weight", "lora_B.weight"));
  EXPECT_EQ(parameters["lora_A.weight"].sizes(), (std::vector<std::int64_t>{4, 3, 12}));
  EXPECT_EQ(parameters["lora_B.weight"].sizes(), (std::vector<std::int64_t>{4, 8, 3}));
  EXPECT_FALSE(nn::has_data(parameters["lora_A.weight"]));
  EXPECT_EQ(adapter.weights().scale, 2.0);
}

}  // namespace
}  // namespace tessera::moe::experts_test
