#include "models/decoder.h"

#include <ATen/ATen.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/autograd.h>

#include "dist/held_bytes.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "models/description.h"
#include "models/gemma4/gemma4_layer.h"
#include "models/gemma4/gemma4_model.h"
#include "models/gemma4/gemma4_vision.h"
#include "nn/parameter.h"
#include "nn/rope.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/shard.h"
#include "unit/models/reference.h"
#include "unit/models/small_spec.h"

namespace tessera::models::decoder_test {
namespace {

ModelSpec tied_with_biases() {
  ModelSpec spec = tiny(Family::kLlama, 2);
  spec.tie_word_embeddings = true;
  spec.attention_bias = true;
  spec.mlp_bias = true;
  return spec;
}

TEST(Decoder, ParametersAreThoseOfTheTable) {
  for (const ModelSpec& spec : {tiny(Family::kQwen3, 2), tied_with_biases()}) {
    Decoder model(spec);
    std::map<std::string, std::vector<std::int64_t>> found;
    for (const auto& item : model.named_parameters()) {
      EXPECT_TRUE(found.emplace(item.key(), item.value().sizes().vec()).second) << item.key();
      EXPECT_TRUE(item.value().requires_grad());
    }
    std::map<std::string, std::vector<std::int64_t>> expected;
    for (const ParameterSpec& row : describe(spec).parameters) expected[row.name] = row.shape;
    EXPECT_EQ(found, expected);
  }
}

TEST(Decoder, UnitsCoverEveryParameterUnderItsTrueName) {
  const ModelSpec spec = tiny(Family::kQwen3, 2);
  Decoder model(spec);
  std::map<std::string, at::Tensor> found;
  const auto add = [&](const std::string& unit, const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      found[model.canonical_name(unit, item.key())] = item.value();
    }
  };
  add("model.embed_tokens", *model.embedding().module());
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    add("model.layers." + std::to_string(i), *model.layers()[i].module());
  }
  add("head", *model.head().module());
  for (const ParameterSpec& row : describe(spec).parameters) {
    ASSERT_TRUE(found.contains(row.name)) << row.name;
    EXPECT_TRUE(found.at(row.name).is_same(model.named_parameters()[row.name])) << row.name;
  }
  EXPECT_EQ(found.size(), describe(spec).parameters.size());
}

TEST(Decoder, AFreshModelHasNoMemoryAndSaysSo) {
  Decoder model(tiny(Family::kQwen3, 2));
  for (const auto& item : model.named_parameters()) {
    EXPECT_EQ(item.value().storage().nbytes(), 0u) << item.key();
  }
  EXPECT_THAT([&] { model.logits(at::zeros({1, 3}, at::kLong)); },
              ::testing::ThrowsMessage<std::exception>(Says("parameter has no data yet")));
}

TEST(Decoder, TiedHeadIsAnotherLeafOverTheSameMemory) {
  Decoder model(tied_with_biases());
  const at::Tensor& head = model.head().module()->lm_head()->weight;
  const at::Tensor& embedding = model.embedding().module()->weight;
  EXPECT_FALSE(head.is_same(embedding));
  EXPECT_TRUE(head.is_alias_of(embedding));
  nn::materialize(model);
  EXPECT_EQ(head.data_ptr(), embedding.data_ptr());
  model.loss_sum(at::ones({1, 3}, at::kLong), at::ones({1, 3}, at::kLong)).backward();
  EXPECT_TRUE(head.grad().defined());
  EXPECT_TRUE(embedding.grad().defined());
  EXPECT_FALSE(head.grad().is_alias_of(embedding.grad()));
}

TEST(Decoder, NoRowsRunForwardAndBackward) {
  for (const ModelSpec& spec : {tiny(Family::kQwen3, 2), tied_with_biases()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      Decoder model(spec);
      nn::materialize(model);
      model.to(dtype);
      const at::Tensor none = at::zeros({0, 5}, at::kLong);
      EXPECT_EQ(model.logits(none).sizes(), (at::IntArrayRef{0, 5, 20}));
      const at::Tensor loss = model.loss_sum(none, none);
      EXPECT_EQ(loss.item<double>(), 0.0);
      loss.backward();
      for (const auto& item : model.named_parameters()) {
        ASSERT_TRUE(item.value().grad().defined()) << item.key();
        EXPECT_EQ(item.value().grad().abs().sum().item<double>(), 0.0) << item.key();
      }
    }
  }
}

// Logits over a key-value cache against those of the whole text, on the reference models.

class Decode : public ::testing::TestWithParam<const char*> {};

/// Logits of the last position of every prefix, token by token after a prompt. [B, T - prompt, V]
at::Tensor cached_logits(Decoder& model, const at::Tensor& ids, std::int64_t prompt) {
  DecoderCache cache = model.make_cache(ids.size(1));
  std::vector<at::Tensor> steps{model.decode(ids.narrow(1, 0, prompt), cache)};
  for (std::int64_t t = prompt; t < ids.size(1); ++t) {
    steps.push_back(model.decode(ids.narrow(1, t, 1), cache));
  }
  EXPECT_EQ(cache.length(), ids.size(1));
  return at::stack(steps, 1);
}

TEST_P(Decode, CachedLogitsAreThoseOfTheWholeText) {
  const Reference reference(GetParam());
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  for (const std::int64_t prompt : {std::int64_t{1}, std::int64_t{13}, ids.size(1)}) {
    const at::Tensor found = cached_logits(*model, ids, prompt);
    const at::Tensor expected =
        model->logits(ids).detach().narrow(1, prompt - 1, ids.size(1) - prompt + 1);
    // The bound of the data's README for a second fp32 implementation: only the order of sums
    // differs.
    EXPECT_LT((found - expected).abs().max().item<double>(), 5e-5) << "prompt of " << prompt;
  }
}

/// Texts continue by several tokens at once, as a second prompt does.
TEST_P(Decode, SeveralTokensFollowThoseOfTheCache) {
  const Reference reference(GetParam());
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  const at::Tensor expected = model->logits(ids).detach();
  DecoderCache cache = model->make_cache(ids.size(1));
  for (const std::int64_t count : {1, 2, 6, 1, 9, 5}) {
    const at::Tensor found = model->decode(ids.narrow(1, cache.length(), count), cache);
    const at::Tensor last = expected.select(1, cache.length() - 1);
    EXPECT_LT((found - last).abs().max().item<double>(), 5e-5) << "up to " << cache.length();
  }
}

TEST_P(Decode, Bfloat16LogitsStayWithinItsRoundings) {
  const Reference reference(GetParam());
  const auto model = reference.model(Reference::Compute::kBFloat16);
  const at::Tensor ids = reference.result("input_ids");
  const at::Tensor whole = reference.result("logits");
  const at::Tensor found = cached_logits(*model, ids, 5).to(at::kFloat);
  const at::Tensor expected = whole.narrow(1, 4, ids.size(1) - 4);
  const at::Tensor plain = model->logits(ids).detach().to(at::kFloat).narrow(1, 4, ids.size(1) - 4);
  // Both round to bf16 at the same places, so both are about as far from the fp32 truth.
  const double error = (found - expected).norm().item<double>();
  const double plain_error = (plain - expected).norm().item<double>();
  EXPECT_LT(error, 1.5 * plain_error);
}

INSTANTIATE_TEST_SUITE_P(
    Folders, Decode,
    ::testing::Values("qwen3-fp32", "qwen3-mixed", "llama-fp32", "llama-mixed", "qwen2-fp32",
                      "qwen2-mixed", "mistral-fp32", "mistral-mixed", "olmo2-fp32", "olmo2-mixed",
                      "gemma3-text-fp32", "gemma3-text-mixed", "granite-fp32", "granite-mixed",
                      "smollm3-fp32", "smollm3-mixed", "phi3-fp32", "phi3-mixed", "qwen3-next-fp32",
                      "qwen3-5-text-fp32", "nemotron-h-fp32", "nemotron-h-mixed"),
    [](const auto& folder) {
      std::string name = folder.param;
      for (char& c : name) c = c == '-' ? '_' : c;
      return name;
    });

// Phi-4-mini's longrope: texts of at most 16 positions turn otherwise than longer ones. Property:
// over a cache a text has the logits of its whole forward at every length, and a text that outgrows
// the 16 is refused by its cache, whose keys are those of a short one.
TEST(DecodeLongRope, ATextThatOutgrowsShortRowsWantsANewCache) {
  const Reference reference("phi4-mini-fp32");
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  const auto expect_whole = [&](const at::Tensor& found, std::int64_t length) {
    const at::Tensor whole = model->next_logits(ids.narrow(1, 0, length));
    EXPECT_LT((found - whole).abs().max().item<double>(), 5e-5) << length;
  };
  DecoderCache cache = model->make_cache(ids.size(1));
  expect_whole(model->decode(ids.narrow(1, 0, 13), cache), 13);
  for (std::int64_t t = 13; t < 16; ++t) {
    expect_whole(model->decode(ids.narrow(1, t, 1), cache), t + 1);
  }
  EXPECT_TRUE(outgrows(model->spec(), 16, 17));
  EXPECT_REFUSED(kUsage, model->decode(ids.narrow(1, 16, 1), cache), "a text of 17 positions",
                 "new cache");
  cache = model->make_cache(ids.size(1));
  expect_whole(model->decode(ids.narrow(1, 0, 17), cache), 17);
  for (std::int64_t t = 17; t < ids.size(1); ++t) {
    EXPECT_FALSE(outgrows(model->spec(), t, t + 1));
    expect_whole(model->decode(ids.narrow(1, t, 1), cache), t + 1);
  }
  const at::Tensor short_row = model->logits(ids.narrow(1, 0, 16)).detach();
  const at::Tensor long_row = model->logits(ids).detach().narrow(1, 0, 16);
  EXPECT_GT((short_row - long_row).abs().max().item<double>(), 1e-2) << "the length counts";
}

TEST(DecodeErrors, MorePositionsThanTheCacheHasRoomForAreRefused) {
  const Reference reference("qwen3-fp32");
  const auto model = reference.model(Reference::Compute::kFloat32);
  DecoderCache cache = model->make_cache(3);
  EXPECT_THROW(model->decode(at::zeros({1, 4}, at::kLong), cache), Error);
}

// A head's gradient is never deferred: a deferred weight product would keep the gradient of all
// logits.

template <class Head>
void expect_no_ticket(std::shared_ptr<Head> head, const ModelSpec& spec) {
  nn::materialize(*head);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : head->named_parameters()) item.value().fill_(0.5);
  }
  test::ranks(1).run([&](World& world) {
    auto handle = fully_shard(head, test::data_mesh(world));
    handle.set_defer_weight_gradients(true);
    const at::Tensor x = at::ones({1, 3, spec.hidden_size}).set_requires_grad(true);
    const at::Tensor targets = at::arange(3, at::kLong).reshape({1, 3});
    const at::Tensor loss = handle.forward(x, targets);
    torch::autograd::backward({loss}, {});
    EXPECT_EQ(handle.unit()->runtime().sink().open_tickets(), 0U);
    EXPECT_TRUE(handle.named_parameters()["lm_head.weight"].grad().defined());
    EXPECT_TRUE(x.grad().defined());
  });
}

TEST(Head, OfADecoderFormsItsGradientAtOnce) {
  const ModelSpec spec = tiny(Family::kQwen3);
  expect_no_ticket(std::make_shared<DecoderHead>(spec, local_sizes(spec, {})), spec);
}

TEST(Head, OfGemma4FormsItsGradientAtOnce) {
  ModelSpec spec = tiny(Family::kGemma4);
  spec.gemma4.emplace().final_logit_softcapping = 30.0;
  expect_no_ticket(std::make_shared<Gemma4Head>(spec, nn::TensorRegion()), spec);
}

// Checks what a layer holds between forward and backward, by mode; tests/golden/recompute_test.cpp
// checks that results do not depend on it.
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
}  // namespace tessera::models::decoder_test
