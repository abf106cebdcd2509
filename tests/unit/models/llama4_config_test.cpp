// What a config.json of Llama 4's text model says, in both spellings, and what is refused in it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::llama4_config_test {
namespace {

using nlohmann::json;
using Layers = std::vector<std::int64_t>;

constexpr auto kChunked = LayerType::kChunked;
constexpr auto kFull = LayerType::kFull;

constexpr ConfigOfFolder kConfig("llama4-text-fp32");

TEST(Llama4Config, SaysChunksTemperatureAndExpertsInTurn) {
  const ModelSpec spec = kConfig.spec();
  EXPECT_EQ(spec.family, Family::kLlama4);
  EXPECT_EQ(spec.chunked, (ChunkedSpec{.attention_chunk_size = 8, .floor_scale = 8}));
  EXPECT_EQ(spec.layer_types, (std::vector{kChunked, kChunked, kChunked, kFull}));
  EXPECT_EQ(spec.intermediate_size, 48);
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 4,
                               .experts_per_token = 1,
                               .moe_intermediate_size = 16,
                               .shared_intermediate_size = 16,
                               .scores = ExpertScores::kSigmoidOfChosen,
                               .scores_before_experts = true,
                               .layout = ExpertLayout::kInOut,
                               .sparse_step = 2,
                               .router_aux_loss_coef = 0.001}));
  EXPECT_EQ(routed_experts(spec).layers, (Layers{1, 3}));
}

TEST(Llama4Config, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept({json::object(),
                       {{"moe_layers", {0, 2, 3}}},
                       {{"moe_layers", {3}}},
                       {{"no_rope_layers", {1, 0, 1, 1}}},
                       {{"use_qk_norm", false}},
                       {{"attn_temperature_tuning", false}}});
}

TEST(Llama4Config, LayersMayBeListed) {
  EXPECT_EQ(routed_experts(kConfig.spec({{"moe_layers", {0, 2, 3}}})).layers, (Layers{0, 2, 3}));
  EXPECT_EQ(routed_experts(kConfig.spec({{"moe_layers", {3}}})).layers, (Layers{3}));
  EXPECT_EQ(kConfig.spec({{"no_rope_layers", {1, 0, 1, 1}}}).layer_types,
            (std::vector{kChunked, kFull, kChunked, kChunked}));
  EXPECT_EQ(kConfig.spec({{"no_rope_layer_interval", 2}}).layer_types,
            (std::vector{kChunked, kFull, kChunked, kFull}));
}

// As it is published: the text model inside one that sees images.
TEST(Llama4Config, AFolderThatSeesImagesHasTheTextModelInIt) {
  const json whole{{"architectures", {"Llama4ForConditionalGeneration"}},
                   {"boi_token_index", 5},
                   {"image_token_index", 6},
                   {"model_type", "llama4"},
                   {"text_config", kConfig.json()},
                   {"tie_word_embeddings", false},
                   {"vision_config", {{"hidden_size", 8}}}};
  EXPECT_EQ(parse_spec(whole.dump()).spec, kConfig.spec());
  const auto name = traits(Family::kLlama4).module_name;
  EXPECT_EQ(name("language_model.model.layers.1.feed_forward.router.weight"),
            "model.layers.1.feed_forward.router.weight");
  EXPECT_EQ(name("language_model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(name("vision_model.patch_embedding.linear.weight"), "");
  EXPECT_EQ(name("multi_modal_projector.linear_1.weight"), "");
}

// 4 is what the first published configs have.
TEST(Llama4Config, TemperatureMayBeANumber) {
  EXPECT_EQ(kConfig.spec({{"attn_temperature_tuning", 4}}), kConfig.spec());
  EXPECT_FALSE(kConfig.spec({{"attn_temperature_tuning", 0}}).chunked->attn_temperature_tuning);
}

TEST(Llama4Config, OtherMathsIsRefusedWithKeyAndValue) {
  kConfig.expect_refused({
      {"attention_chunk_size", nullptr},
      {"attention_chunk_size", 0},
      {"no_rope_layers", {1, 0}},
      {"no_rope_layers", {1, 0, 2, 1}},
      {"layer_types", {"full_attention", "full_attention", "full_attention", "full_attention"}},
      {"moe_layers", {4}},
      {"moe_layers", "all"},
      {"router_jitter_noise", 0.1},
      {"num_experts_per_tok", 5},
      {"floor_scale", 0},
      {"attn_temperature_tuning", "yes"},
  });
}

TEST(Llama4Config, RowsAreThoseOfTheHubsFiles) {
  std::vector<std::string> rows;
  for (const ParameterSpec& row : describe(kConfig.spec()).parameters) {
    if (row.unit == "model.layers.1") rows.push_back(row.name.substr(15));
  }
  EXPECT_EQ(rows,
            (std::vector<std::string>{
                "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                "self_attn.o_proj.weight", "feed_forward.router.weight",
                "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj",
                "feed_forward.shared_expert.gate_proj.weight",
                "feed_forward.shared_expert.up_proj.weight",
                "feed_forward.shared_expert.down_proj.weight", "input_layernorm.weight",
                "post_attention_layernorm.weight"}));
}

}  // namespace
}  // namespace tessera::models::llama4_config_test
