// What a layer holds between forward and backward, by mode; that the result tells nothing of it is
// tests/golden/recompute_test.cpp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

#include "dist/held_bytes.h"
#include "models/decoder.h"
#include "models/gemma4/gemma4_layer.h"
#include "models/gemma4/gemma4_vision.h"
#include "nn/parameter.h"
#include "nn/rope.h"
#include "unit/models/small_spec.h"

namespace tessera::models::recompute_test {
namespace {

using test::HeldBytes;

// Those of tiny().
constexpr std::int64_t kHidden = 8, kInner = 12, kHeads = 4, kGroups = 2, kHeadDim = 4;
constexpr std::int64_t kRows = 2, kPositions = 5, kTokens = kRows * kPositions;

ModelSpec small_gemma() {
  ModelSpec spec = tiny(Family::kGemma4);
  Gemma4Spec& gemma = spec.gemma4.emplace();
  gemma.layers = {
      {.type = LayerType::kSliding, .head_dim = kHeadDim, .num_key_value_heads = kGroups}};
  spec.moe = MoeSpec{.num_experts = 3,
                     .experts_per_token = 2,
                     .moe_intermediate_size = 7,
                     .norm_topk_prob = true,
                     .activation = ExpertActivation::kGeglu};
  return spec;
}

template <class M>
std::shared_ptr<M> drawn(std::shared_ptr<M> module) {
  nn::materialize(*module);
  const at::NoGradGuard no_grad;
  for (auto& item : module->named_parameters()) item.value().uniform_(-0.5, 0.5);
  return module;
}

std::shared_ptr<nn::Rope> rope() {
  return std::make_shared<nn::Rope>(nn::RopeOptions{.theta = 1e4}, kHeadDim);
}

std::shared_ptr<DecoderLayer> dense_layer(Family family) {
  const ModelSpec spec = tiny(family);
  return std::make_shared<DecoderLayer>(spec, 0, local_sizes(spec), rope());
}

at::Tensor input() {
  return at::linspace(-1, 1, kTokens * kHidden).view({kRows, kPositions, kHidden});
}

/// Bytes that hang on the result of `forward`, itself not counted.
template <class Forward>
std::int64_t held_by(const Forward& forward) {
  (void)forward();  // tables are made once
  const HeldBytes counter;
  const at::Tensor y = forward();
  return counter.bytes() - static_cast<std::int64_t>(y.nbytes());
}

/// A layer whose forward is `forward`, and how many fp32 values its products have.
template <class M, class Forward>
void expect_held(const std::shared_ptr<M>& layer, std::int64_t products, const Forward& forward) {
  const std::int64_t plain = held_by(forward);
  layer->set_recompute(RecomputeMode::kFull);
  EXPECT_EQ(held_by(forward), 0) << "the input is the caller's";
  layer->set_recompute(RecomputeMode::kSelective);
  EXPECT_EQ(held_by(forward), 4 * products);
  EXPECT_GT(plain, 4 * products);
  for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
  EXPECT_EQ(held_by(forward), 0) << "frozen, without an input that needs a gradient: no graph";
  EXPECT_FALSE(forward().requires_grad());
}

constexpr std::int64_t kAttentionProducts =
    kTokens * (kHeads + 2 * kGroups) * kHeadDim + kTokens * kHidden;
constexpr std::int64_t kMlpProducts = kTokens * (2 * kInner + kHidden);

TEST(LayerRecompute, ADenseLayerHoldsNothingOrItsProducts) {
  for (const Family family : {Family::kQwen3, Family::kLlama}) {
    const auto layer = drawn(dense_layer(family));
    const auto x = input();
    expect_held(layer, kAttentionProducts + kMlpProducts, [&] { return layer->forward(x, {}).x; });
  }
}

TEST(LayerRecompute, ALayerWithExpertsHoldsNothingOrItsProducts) {
  const auto layer =
      drawn(std::make_shared<Gemma4TextLayer>(small_gemma(), 0, ModelAxes{}, rope()));
  const auto x = input();
  constexpr std::int64_t experts = kTokens * 3 + 2 * kTokens * (2 * 7 + kHidden);
  expect_held(layer, kAttentionProducts + kMlpProducts + experts,
              [&] { return layer->forward(x, {}, {}).x; });
}

TEST(LayerRecompute, ALayerOfTheTowerHoldsNothingOrItsProducts) {
  Gemma4Vision vision;
  vision.hidden_size = kHidden;
  vision.intermediate_size = kInner;
  vision.num_attention_heads = kHeads;
  vision.num_key_value_heads = kGroups;
  vision.head_dim = kHeadDim;
  const auto layer = drawn(std::make_shared<Gemma4VisionLayer>(vision));
  const auto x = input();
  const auto places = at::arange(2 * kTokens, at::kLong).view({kRows, kPositions, 2});
  const auto table = nn::axial_table(places, kHeadDim, 100.0, at::kFloat);
  const auto visible = at::ones({kRows, 1, kPositions}, at::kBool);
  expect_held(layer, kAttentionProducts + kMlpProducts,
              [&] { return layer->forward(x, table, visible); });
}

// The graph may outlive the model, as it may without recomputation.
TEST(LayerRecompute, BackwardWorksWhenOnlyTheGraphIsLeft) {
  auto layer = drawn(dense_layer(Family::kQwen3));
  const auto x = input().requires_grad_();
  layer->forward(x, {}).x.sum().backward();
  const at::Tensor expected = x.grad().clone();
  x.mutable_grad().reset();
  layer->set_recompute(RecomputeMode::kFull);
  const at::Tensor loss = layer->forward(x, {}).x.sum();
  layer.reset();
  loss.backward();
  EXPECT_TRUE(x.grad().equal(expected));
}

}  // namespace
}  // namespace tessera::models::recompute_test
