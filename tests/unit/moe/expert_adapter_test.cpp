// Adapters beside the products of experts, against one expert after the other in fp64.
#include "moe/expert_adapter.h"

#include <gmock/gmock.h>

#include "moe/experts.h"
#include "nn/mlp.h"
#include "nn/parameter.h"
#include "unit/nn/compare.h"

namespace tessera::moe::expert_adapter_test {
namespace {

using nn::kFloat32;
using nn::kOneBFloat16Rounding;
using Tensors = std::vector<at::Tensor>;

constexpr double kScale = 1.5;
constexpr std::int64_t kExperts = 4;

class ExpertAdapters : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(31); }
};

/// Expert 2 has no rows.
nn::GroupOffsets offsets(std::int64_t rows) { return {0, rows / 4, rows / 2, rows / 2, rows}; }

/// base, x, a, b.
at::Tensor fused(const Tensors& in) {
  return add_expert_adapter(in[0], in[1], {in[2], in[3], kScale}, {offsets(in[1].size(0))});
}

at::Tensor one_by_one(const Tensors& in) {
  const nn::GroupOffsets begins = offsets(in[1].size(0));
  Tensors parts;
  for (std::int64_t e = 0; e < kExperts; ++e) {
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
      nn::expect_equals_composite(fused, one_by_one,
                                  {at::randn({rows, 8}), at::randn({rows, 12}),
                                   at::randn({kExperts, rank, 12}), at::randn({kExperts, 8, rank})},
                                  kFloat32, "float");
    }
  }
}

TEST_F(ExpertAdapters, BesideABFloat16ProductAreRoundedOnce) {
  nn::expect_equals_composite(
      fused, one_by_one,
      {at::randn({40, 8}).to(at::kBFloat16), at::randn({40, 12}).to(at::kBFloat16),
       at::randn({kExperts, 4, 12}), at::randn({kExperts, 8, 4})},
      kOneBFloat16Rounding, "bfloat16");
}

TEST_F(ExpertAdapters, AnExpertWithoutRowsHasZerosAsGradient) {
  const at::Tensor a = at::randn({kExperts, 4, 12}).requires_grad_(true);
  const at::Tensor b = at::randn({kExperts, 8, 4}).requires_grad_(true);
  fused({at::randn({40, 8}), at::randn({40, 12}), a, b}).sum().backward();
  for (const at::Tensor& grad : {a.grad(), b.grad()}) {
    EXPECT_EQ(grad[2].abs().max().item<double>(), 0.0);
    EXPECT_GT(grad[1].abs().max().item<double>(), 0.0);
  }
}

/// What the layer adds up to where W + scale * B A stands in W's place.
at::Tensor merged(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                  nn::GroupLayout layout) {
  const at::Tensor delta = at::matmul(b, a) * kScale;
  return weight + (layout == nn::GroupLayout::kOutIn ? delta : delta.transpose(1, 2));
}

// Frozen weights, biases, both layouts, both places of the score: what the layer computes, and the
// gradients of tokens, scores and factors, are those of merged weights.
TEST_F(ExpertAdapters, BesideFrozenExpertsEqualMergedWeights) {
  constexpr std::int64_t kHidden = 12, kInner = 8, kRank = 4;
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
               (out_in ? at::randn({kExperts, out, in}) : at::randn({kExperts, in, out}));
      };
      const at::Tensor gate_up = matrices(2 * kInner, kHidden), down = matrices(kHidden, kInner);
      const at::Tensor gate_up_bias = kWeights * at::randn({kExperts, 2 * kInner});
      const at::Tensor down_bias = kWeights * at::randn({kExperts, kHidden});
      const ExpertOptions options{.activation = of_halves(nn::geglu), .score = score};
      const auto beside = [&](const Tensors& in) {
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
      nn::expect_equals_composite(beside, truth,
                                  {at::randn({5, kHidden}), at::rand({5, 2}),
                                   kFactors * at::randn({kExperts, kRank, kHidden}),
                                   kFactors * at::randn({kExperts, 2 * kInner, kRank}),
                                   kFactors * at::randn({kExperts, kRank, kInner}),
                                   kFactors * at::randn({kExperts, kHidden, kRank})},
                                  kFloat32, out_in ? "out, in" : "in, out");
    }
  }
}

TEST_F(ExpertAdapters, HoldTheirFactorsAndBeginWithoutData) {
  const ExpertAdapter adapter({.experts = 4, .in = 12, .out = 8, .rank = 3}, {}, 2.0);
  const auto parameters = adapter.named_parameters();
  EXPECT_THAT(parameters.keys(), ::testing::ElementsAre("lora_A.weight", "lora_B.weight"));
  EXPECT_EQ(parameters["lora_A.weight"].sizes(), (std::vector<std::int64_t>{4, 3, 12}));
  EXPECT_EQ(parameters["lora_B.weight"].sizes(), (std::vector<std::int64_t>{4, 8, 3}));
  EXPECT_FALSE(nn::has_data(parameters["lora_A.weight"]));
  EXPECT_EQ(adapter.weights().scale, 2.0);
}

}  // namespace
}  // namespace tessera::moe::expert_adapter_test
