// What a config.json of GLM 4.5 says, in both spellings, and what is refused in it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::glm4_moe_config_test {
namespace {

using nlohmann::json;

constexpr ConfigOfFolder kConfig("glm4-moe-fp32");

TEST(Glm4MoeConfig, SaysHalfTurnedHeadsBiasesAndSigmoids) {
  const ModelSpec spec = kConfig.spec();
  EXPECT_EQ(spec.family, Family::kGlm4Moe);
  EXPECT_EQ(spec.rope.partial_rotary_factor, 0.5);
  EXPECT_EQ(spec.use_qk_norm, true);
  EXPECT_TRUE(spec.attention_bias);
  EXPECT_FALSE(traits(spec.family).output_bias);
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 8,
                               .experts_per_token = 3,
                               .moe_intermediate_size = 8,
                               .shared_intermediate_size = 8,
                               .scores = ExpertScores::kSigmoid,
                               .router_dtype = RouterDtype::kFloat32,
                               .norm_topk_prob = true,
                               .routed_scaling_factor = 2.5,
                               .first_dense_layers = 1}));
}

TEST(Glm4MoeConfig, WhatIsWrittenHasTheHubsKeys) {
  json hub = kConfig.json();
  hub.erase("transformers_version");
  json written = json::parse(config_json(kConfig.spec()));
  EXPECT_EQ(written.at("bos_token_id"), nullptr);
  written.erase("bos_token_id");
  EXPECT_EQ(written, hub);
}

TEST(Glm4MoeConfig, AbsentKeysTakeTransformersDefaults) {
  const ModelSpec spec = kConfig.spec_without(
      {"partial_rotary_factor", "use_qk_norm", "attention_bias", "n_routed_experts",
       "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "norm_topk_prob",
       "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group", "rms_norm_eps"});
  EXPECT_EQ(spec.rope.partial_rotary_factor, 0.5);
  EXPECT_EQ(spec.use_qk_norm, false);
  EXPECT_FALSE(spec.attention_bias);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 128,
                               .experts_per_token = 8,
                               .moe_intermediate_size = 1408,
                               .shared_intermediate_size = 1408,
                               .scores = ExpertScores::kSigmoid,
                               .router_dtype = RouterDtype::kFloat32,
                               .norm_topk_prob = true,
                               .first_dense_layers = 1}));
}

TEST(Glm4MoeConfig, WholeHeadsMayTurn) {
  json written = json::parse(file_text("glm4-moe-fp32", "config.json"));
  written["rope_parameters"]["partial_rotary_factor"] = 1.0;
  EXPECT_EQ(parse_spec(written.dump()).spec.rope.partial_rotary_factor, 1.0);
  EXPECT_EQ(kConfig.spec({{"partial_rotary_factor", 1.0}}).rope.partial_rotary_factor, 1.0);
}

TEST(Glm4MoeConfig, OtherMathsIsRefusedWithKeyAndValue) {
  kConfig.expect_refused({
      {"partial_rotary_factor", 0.25},
      {"head_dim", 18},
      {"scoring_func", "softmax"},
      {"n_group", 3},
      {"mlp_bias", true},
      {"use_qk_norm", 1},
      {"topk_group", 2},
      {"moe_layer_freq", 2},
      {"hidden_act", "gelu"},
  });
}

TEST(Glm4MoeConfig, TheLayerBehindTheLastIsNoPartOfTheModel) {
  json published = kConfig.json();
  published["num_nextn_predict_layers"] = 1;
  const ParsedSpec parsed = parse_spec(published.dump());
  EXPECT_EQ(prediction_layer(parsed, "model.layers.4.embed_tokens.weight"), 4);
  EXPECT_EQ(prediction_layer(parsed, "model.layers.3.mlp.gate.weight"), std::nullopt);
  EXPECT_EQ(prediction_layer(parsed, "model.layers.5.mlp.gate.weight"), std::nullopt);
}

}  // namespace
}  // namespace tessera::models::glm4_moe_config_test
