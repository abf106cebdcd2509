// What a config.json of DeepSeek V3 says, in both spellings, and what is refused in it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::deepseek_v3_config_test {
namespace {

using nlohmann::json;

constexpr ConfigOfFolder kConfig("deepseek-v3-fp32");

TEST(DeepseekV3Config, SaysLatentsSigmoidsAndGroups) {
  const ModelSpec spec = kConfig.spec();
  EXPECT_EQ(spec.family, Family::kDeepseekV3);
  EXPECT_EQ(spec.mla, (MlaSpec{.q_lora_rank = 20,
                               .kv_lora_rank = 24,
                               .qk_nope_head_dim = 16,
                               .qk_rope_head_dim = 8,
                               .v_head_dim = 12}));
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 12,
                               .experts_per_token = 4,
                               .moe_intermediate_size = 8,
                               .shared_intermediate_size = 8,
                               .scores = ExpertScores::kSigmoid,
                               .router_dtype = RouterDtype::kFloat32,
                               .norm_topk_prob = true,
                               .routed_scaling_factor = 2.5,
                               .n_group = 4,
                               .topk_group = 2,
                               .first_dense_layers = 1}));
  EXPECT_FALSE(kConfig.spec({{"norm_topk_prob", false}}).moe->norm_topk_prob);
}

TEST(DeepseekV3Config, WhatIsWrittenHasTheHubsKeys) {
  json hub = kConfig.json();
  // Of the published ones only those that say nothing about the computation are left out.
  for (const char* key : {"aux_loss_alpha", "seq_aux", "ep_size", "transformers_version"}) {
    hub.erase(key);
  }
  EXPECT_EQ(json::parse(config_json(kConfig.spec())), hub);
}

TEST(DeepseekV3Config, AbsentKeysTakeTransformersDefaults) {
  const ModelSpec spec = kConfig.spec_without(
      {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
       "moe_intermediate_size", "n_shared_experts", "n_routed_experts", "num_experts_per_tok",
       "first_k_dense_replace", "routed_scaling_factor", "topk_method", "scoring_func", "n_group",
       "topk_group", "norm_topk_prob", "moe_layer_freq"});
  EXPECT_EQ(spec.mla, (MlaSpec{.q_lora_rank = 1536,
                               .kv_lora_rank = 512,
                               .qk_nope_head_dim = 128,
                               .qk_rope_head_dim = 64,
                               .v_head_dim = 128}));
  EXPECT_EQ(spec.moe, (MoeSpec{.num_experts = 256,
                               .experts_per_token = 8,
                               .moe_intermediate_size = 2048,
                               .shared_intermediate_size = 2048,
                               .scores = ExpertScores::kSigmoid,
                               .router_dtype = RouterDtype::kFloat32,
                               .norm_topk_prob = true,
                               .routed_scaling_factor = 2.5,
                               .n_group = 8,
                               .topk_group = 4,
                               .first_dense_layers = 3}));
}

// One that says how the published weights are packed, and that further layers predict further.
TEST(DeepseekV3Config, WhatPublishedFoldersHaveBesidesChangesNoSpec) {
  const json packed{{"activation_scheme", "dynamic"},
                    {"fmt", "e4m3"},
                    {"quant_method", "fp8"},
                    {"weight_block_size", {128, 128}}};
  EXPECT_EQ(kConfig.spec({{"quantization_config", packed}, {"num_nextn_predict_layers", 1}}),
            kConfig.spec());
}

std::optional<std::int64_t> layer_of(const json& keys, std::string_view published) {
  json config = kConfig.json();
  config.erase("num_nextn_predict_layers");
  config.update(keys);
  return prediction_layer(parse_spec(config.dump()), published);
}

// The model has layers 0 to 2: one that the config does not count is not taken for one that predicts.
TEST(DeepseekV3Config, PredictionLayersAreThoseThatItCounts) {
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"}) {
    const json one{{key, 1}};
    EXPECT_EQ(layer_of(one, "model.layers.3.mlp.gate.weight"), 3);
    EXPECT_EQ(layer_of(one, "model.layers.3.eh_proj.weight"), 3);
    for (const char* other : {"model.layers.2.mlp.gate.weight", "model.layers.4.mlp.gate.weight",
                              "model.layers.x.weight", "model.layers.3", "lm_head.weight"}) {
      EXPECT_EQ(layer_of(one, other), std::nullopt) << other;
    }
    EXPECT_EQ(layer_of({{key, 2}}, "model.layers.4.eh_proj.weight"), 4);
    EXPECT_EQ(layer_of({{key, 0}}, "model.layers.3.eh_proj.weight"), std::nullopt);
  }
  EXPECT_EQ(layer_of(json::object(), "model.layers.3.eh_proj.weight"), std::nullopt);
}

TEST(DeepseekV3Config, OtherMathsIsRefusedWithKeyAndValue) {
  kConfig.expect_refused({
      {"scoring_func", "softmax"},
      {"topk_method", "greedy"},
      {"moe_layer_freq", 2},
      {"rope_interleave", false},
      {"num_key_value_heads", 2},
      {"n_group", 5},
      {"topk_group", 5},
      {"topk_group", 1},
      {"num_experts_per_tok", 13},
      {"num_nextn_predict_layers", -1},
      {"num_mtp_layers", 1},
      {"quantization_config", {{"quant_method", "awq"}}},
      {"quantization_config", {{"quant_method", "fp8"}, {"fmt", "e5m2"}}},
      {"quantization_config", {{"quant_method", "fp8"}, {"bits", 4}}},
  });
}

TEST(DeepseekV3Config, EachRouterHasAStoredBiasAndNoneIsAdded) {
  const ModelDescription description = describe(kConfig.spec());
  ASSERT_EQ(description.buffers.size(), 2U);
  EXPECT_EQ(description.buffers.front(),
            (BufferSpec{"model.layers.1.mlp.gate.e_score_correction_bias", {12}}));
  EXPECT_TRUE(kConfig.spec().moe->has_stored_bias());
}

}  // namespace
}  // namespace tessera::models::deepseek_v3_config_test
