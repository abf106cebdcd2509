// The config.json of DeepSeek V2, in both spellings, and what is refused in it.
#include <nlohmann/json.hpp>

#include "models/description.h"
#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::deepseek_v2_config_test {
namespace {

using nlohmann::json;

/// The keys that the lite model's published config.json has, with small numbers.
json lite() {
  return json::parse(R"({
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "kv_lora_rank": 24,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 16,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 2,
    "norm_topk_prob": false, "num_attention_heads": 4, "num_experts_per_tok": 3,
    "num_hidden_layers": 3, "num_key_value_heads": 4, "pretraining_tp": 1, "q_lora_rank": null,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
    "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,
    "v_head_dim": 12, "vocab_size": 128})");
}

/// The config with the keys of the full model.
json full() {
  json config = lite();
  config["ep_size"] = 1;
  config["q_lora_rank"] = 20;
  config["n_group"] = 4;
  config["topk_group"] = 2;
  config["topk_method"] = "group_limited_greedy";
  config["routed_scaling_factor"] = 16.0;
  return config;
}

ModelSpec spec_of(const json& config) { return parse_spec(config.dump()).spec; }

std::string refusal(json config, const char* key, const json& value) {
  config[key] = value;
  return config_refusal(config.dump());
}

TEST(DeepseekV2Config, PublishedSpellingOfBothModelsIsRead) {
  const ModelSpec spec = spec_of(lite());
  EXPECT_EQ(spec.family, Family::kDeepseekV2);
  EXPECT_EQ(
      spec.mla,
      (MlaSpec{
          .kv_lora_rank = 24, .qk_nope_head_dim = 16, .qk_rope_head_dim = 8, .v_head_dim = 12}));
  EXPECT_EQ(spec.head_dim, 8);
  MoeSpec moe{.num_experts = 8,
              .experts_per_token = 3,
              .moe_intermediate_size = 16,
              .shared_intermediate_size = 32,
              .router_dtype = RouterDtype::kFloat32,
              .first_dense_layers = 1};
  EXPECT_EQ(spec.moe, moe);
  EXPECT_FALSE(spec.is_moe(0));
  EXPECT_TRUE(spec.is_moe(1));
  EXPECT_EQ(spec.rope.type, nn::RopeType::kYarn);

  moe.n_group = 4;
  moe.topk_group = 2;
  moe.routed_scaling_factor = 16.0;
  EXPECT_EQ(spec_of(full()).moe, moe);
  EXPECT_EQ(spec_of(full()).mla->q_lora_rank, 20);
}

// transformers 5 writes head_dim and qk_head_dim, rope_parameters and dtype, and leaves out what it
// does not read.
TEST(DeepseekV2Config, BothSpellingsGiveTheSameSpec) {
  for (const json& hub : {lite(), full()}) {
    json written = hub;
    for (const char* key : {"aux_loss_alpha", "seq_aux", "ep_size", "moe_layer_freq",
                            "scoring_func", "rope_scaling", "rope_theta", "torch_dtype"}) {
      written.erase(key);
    }
    written["head_dim"] = 8;
    written["qk_head_dim"] = 24;
    written["mlp_bias"] = false;
    written["output_router_logits"] = false;
    written["pad_token_id"] = nullptr;
    written["dtype"] = "bfloat16";
    written["rope_parameters"] = hub["rope_scaling"];
    written["rope_parameters"].erase("type");
    written["rope_parameters"]["rope_type"] = "yarn";
    written["rope_parameters"]["rope_theta"] = 10000.0;
    EXPECT_EQ(spec_of(written), spec_of(hub));
    EXPECT_EQ(parse_spec(config_json(spec_of(hub))).spec, spec_of(hub));
  }
}

TEST(DeepseekV2Config, WhatIsWrittenHasTheHubsKeys) {
  for (json hub : {lite(), full()}) {
    const json written = json::parse(config_json(spec_of(hub)));
    // Only those published keys are left out that say nothing about the computation.
    for (const char* key : {"auto_map", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
                            "transformers_version"}) {
      hub.erase(key);
    }
    EXPECT_EQ(written, hub) << written.dump(1);
  }
}

TEST(DeepseekV2Config, AbsentKeysTakeTransformersDefaults) {
  json config = lite();
  for (const char* key :
       {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
        "routed_scaling_factor", "topk_method", "n_group", "topk_group", "num_key_value_heads"}) {
    config.erase(key);
  }
  const ModelSpec spec = spec_of(config);
  EXPECT_EQ(spec.mla, (MlaSpec{.q_lora_rank = 1536,
                               .kv_lora_rank = 512,
                               .qk_nope_head_dim = 128,
                               .qk_rope_head_dim = 64,
                               .v_head_dim = 128}));
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.moe->moe_intermediate_size, 1407);
  EXPECT_EQ(spec.moe->shared_intermediate_size, 2 * 1407);
  EXPECT_EQ(spec.moe->first_dense_layers, 0);
  EXPECT_EQ(spec.moe->n_group, 1);
}

TEST(DeepseekV2Config, OtherMathsIsRefusedWithKeyAndValue) {
  const std::pair<const char*, json> cases[] = {
      {"scoring_func", "sigmoid"},
      {"topk_method", "noaux_tc"},
      {"moe_layer_freq", 2},
      {"norm_topk_prob", true},
      {"num_key_value_heads", 2},
      {"head_dim", 16},
      {"qk_head_dim", 16},
      {"qk_rope_head_dim", 7},
      {"mlp_bias", true},
      {"n_routed_experts", nullptr},
      {"num_experts_per_tok", 9},
      {"q_lora_rank", 0},
      {"routed_scaling_factor", 0},
      {"n_shared_experts", 0},
      {"first_k_dense_replace", -1},
      {"n_group", 3},
      {"topk_group", 5},
      {"topk_group", 1},
      {"rope_interleaved", true},
      {"num_nextn_predict_layers", 1},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_THAT(refusal(full(), key, value), Says(key)) << value;
  }
  json large = full();
  large["hidden_size"] = large["q_lora_rank"] = 1LL << 31;
  EXPECT_THAT(refusal(large, "kv_lora_rank", 1LL << 31), Says("parameters, expected at most"));
  // Greedy routing does not read the groups.
  EXPECT_EQ(refusal(lite(), "n_group", 3), "");
}

TEST(DeepseekV2Config, RowsAreThoseOfTheHubsFiles) {
  const auto names = [](const json& config) {
    std::vector<std::string> rows;
    for (const ParameterSpec& row : describe(spec_of(config)).parameters) {
      std::string shape;
      for (const std::int64_t size : row.shape) shape += " " + std::to_string(size);
      if (row.unit == "model.layers.1") rows.push_back(row.name.substr(15) + shape);
    }
    return rows;
  };
  const std::vector<std::string> mlp{
      "mlp.gate.weight 8 32",
      "mlp.experts.gate_up_proj 8 32 32",
      "mlp.experts.down_proj 8 32 16",
      "mlp.shared_experts.gate_proj.weight 32 32",
      "mlp.shared_experts.up_proj.weight 32 32",
      "mlp.shared_experts.down_proj.weight 32 32",
      "input_layernorm.weight 32",
      "post_attention_layernorm.weight 32",
  };
  std::vector<std::string> expected{
      "self_attn.q_proj.weight 96 32",      "self_attn.kv_a_proj_with_mqa.weight 32 32",
      "self_attn.kv_a_layernorm.weight 24", "self_attn.kv_b_proj.weight 112 24",
      "self_attn.o_proj.weight 32 48",
  };
  expected.insert(expected.end(), mlp.begin(), mlp.end());
  EXPECT_EQ(names(lite()), expected);
  expected.erase(expected.begin());
  const std::vector<std::string> latent{"self_attn.q_a_proj.weight 20 32",
                                        "self_attn.q_a_layernorm.weight 20",
                                        "self_attn.q_b_proj.weight 96 20"};
  expected.insert(expected.begin(), latent.begin(), latent.end());
  EXPECT_EQ(names(full()), expected);
}

}  // namespace
}  // namespace tessera::models::deepseek_v2_config_test
