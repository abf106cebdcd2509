// Families with experts as their config.json says: both spellings, what is refused, what is
// written.

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::moe_config_test {
namespace {

using Shape = std::vector<std::int64_t>;

nlohmann::json hub(const char* name) { return ConfigOfFolder(name).json(); }

/// The message of the refusal of a config.json with another value; "" if there was none.
std::string refusal(const char* name, const std::string& key, const nlohmann::json& value) {
  return ConfigOfFolder(name).refusal({{key, value}});
}

class MoeSpecs : public ::testing::TestWithParam<const char*> {};

TEST_P(MoeSpecs, BothSpellingsGiveTheSameSpec) {
  const ModelSpec written = parse_spec(file_text(GetParam(), "config.json")).spec;
  EXPECT_EQ(written, parse_spec(hub(GetParam()).dump()).spec);
  const auto& sizes = written.moe;
  switch (written.family) {
    case Family::kDeepseekV3:
      EXPECT_EQ(std::pair(sizes->num_experts, sizes->experts_per_token),
                std::pair(std::string(GetParam()).starts_with("kimi") ? 20L : 12L, 4L));
      break;
    case Family::kMixtral:
      EXPECT_EQ(std::pair(sizes->num_experts, sizes->experts_per_token), std::pair(8L, 2L));
      break;
    case Family::kLlama4:
      EXPECT_EQ(std::pair(sizes->num_experts, sizes->experts_per_token), std::pair(4L, 1L));
      break;
    default:
      EXPECT_EQ(std::pair(sizes->num_experts, sizes->experts_per_token), std::pair(8L, 3L));
  }
}

TEST_P(MoeSpecs, WhatIsWrittenIsReadAsTheSame) {
  const ModelSpec spec = parse_spec(hub(GetParam()).dump()).spec;
  EXPECT_EQ(parse_spec(config_json(spec)).spec, spec);
}

/// Names and shapes of every tensor that a table wants of a file.
std::map<std::string, Shape> tensors_of(const std::vector<ParameterSpec>& table) {
  std::map<std::string, Shape> tensors;
  for (const ParameterSpec& row : table) {
    if (row.stacked.empty()) tensors[row.name] = row.shape;
    std::int64_t numel = 0;
    for (const std::string& name : row.stacked) {
      tensors[name] = row.stacked_shape;
      std::int64_t each = 1;
      for (const std::int64_t size : row.stacked_shape) each *= size;
      numel += each;
    }
    EXPECT_EQ(row.stacked.empty() ? row.numel() : numel, row.numel()) << row.name;
  }
  return tensors;
}

TEST_P(MoeSpecs, TheTableWantsTheTensorsOfTheFile) {
  const std::string bytes = file_text(GetParam(), "model.safetensors");
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) {
    length = length << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  }
  std::map<std::string, Shape> stored;
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  for (const auto& [name, info] : header.items()) {
    if (name != "__metadata__") stored[name] = info.at("shape").get<Shape>();
  }
  const ModelDescription description = describe(parse_spec(hub(GetParam()).dump()).spec);
  auto wanted = tensors_of(description.parameters);
  for (const BufferSpec& buffer : description.buffers) wanted[buffer.name] = buffer.shape;
  EXPECT_EQ(wanted, stored);
}

INSTANTIATE_TEST_SUITE_P(Folders, MoeSpecs,
                         ::testing::Values("deepseek-v2-fp32", "deepseek-v2-group-fp32",
                                           "deepseek-v2-group-mixed", "deepseek-v3-fp32",
                                           "deepseek-v3-mixed", "kimi-k2-fp32", "kimi-k2-mixed",
                                           "glm4-moe-fp32", "glm4-moe-mixed", "llama4-text-fp32",
                                           "llama4-text-mixed", "gpt-oss-fp32", "gpt-oss-mixed",
                                           "qwen3-moe-fp32", "qwen3-moe-mixed", "mixtral-fp32",
                                           "mixtral-mixed", "qwen3-next-fp32", "qwen3-next-mixed",
                                           "nemotron-h-fp32", "nemotron-h-mixed"));

TEST(MoeSpec, GptOssHasWindowsSinksAndBiases) {
  const ModelSpec spec = parse_spec(hub("gpt-oss-fp32").dump()).spec;
  EXPECT_EQ(spec.family, Family::kGptOss);
  EXPECT_TRUE(spec.attention_bias);
  EXPECT_TRUE(traits(spec.family).attention_sinks);
  EXPECT_EQ(spec.sliding_window, 8);
  EXPECT_TRUE(spec.is_sliding(0));
  EXPECT_FALSE(spec.is_sliding(1));
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.rope.type, nn::RopeType::kYarn);
  EXPECT_EQ(spec.moe->moe_intermediate_size, spec.intermediate_size);
  EXPECT_EQ(spec.moe->swiglu_alpha, 1.702);
  EXPECT_EQ(spec.moe->router_aux_loss_coef, 0.9);
  EXPECT_FALSE(spec.moe->output_router_logits);
}

TEST(MoeSpec, GptOssWithoutItsOwnKeysIsTransformersDefault) {
  nlohmann::json config = hub("gpt-oss-fp32");
  for (const char* key :
       {"layer_types", "attention_bias", "rms_norm_eps", "swiglu_alpha", "swiglu_limit",
        "initial_context_length", "experts_per_token", "router_aux_loss_coef", "rope_theta",
        "sliding_window", "head_dim", "max_position_embeddings"}) {
    config.erase(key);
  }
  const ModelSpec spec = parse_spec(config.dump()).spec;
  EXPECT_TRUE(spec.attention_bias);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.rope.theta, 150000.0);
  EXPECT_EQ(spec.rope.type, nn::RopeType::kYarn);
  EXPECT_EQ(spec.sliding_window, 128);
  EXPECT_EQ(spec.head_dim, 64);
  EXPECT_EQ(spec.max_position_embeddings, 131072);
  EXPECT_EQ(spec.moe->swiglu_alpha, 1.702);
  EXPECT_EQ(spec.moe->swiglu_limit, 7.0);
  EXPECT_EQ(spec.moe->router_aux_loss_coef, 0.001);
  EXPECT_TRUE(spec.is_sliding(2));
  EXPECT_FALSE(spec.is_sliding(3));
}

// As transformers: the record of either spelling has theta, or the family's own holds.
TEST(MoeSpec, GptOssThetaIsItsOwnWhereNoRecordHasOne) {
  nlohmann::json config = nlohmann::json::parse(file_text("gpt-oss-fp32", "config.json"));
  config.erase("rope_theta");
  config["rope_parameters"].erase("rope_theta");
  EXPECT_EQ(parse_spec(config.dump()).spec.rope.theta, 150000.0);
  config["rope_parameters"]["rope_theta"] = 5000.0;
  EXPECT_EQ(parse_spec(config.dump()).spec.rope.theta, 5000.0);
  config["rope_parameters"] = {{"rope_type", "default"}};
  EXPECT_EQ(parse_spec(config.dump()).spec.rope.theta, 150000.0);
  // Without it a family has 10000.
  nlohmann::json other = hub("qwen3-moe-fp32");
  other.erase("rope_theta");
  EXPECT_EQ(parse_spec(other.dump()).spec.rope.theta, 10000.0);
}

TEST(MoeSpec, WhatGptOssCannotBeIsRefusedWithItsValue) {
  const char* const name = "gpt-oss-fp32";
  EXPECT_THAT(refusal(name, "experts_per_token", 2), Says("experts_per_token: found 2"));
  EXPECT_THAT(refusal(name, "num_experts", 4), Says("num_experts: found 4"));
  EXPECT_THAT(refusal(name, "num_experts_per_tok", 9), Says("num_experts_per_tok: found 9"));
  EXPECT_THAT(refusal(name, "initial_context_length", 8192), Says("found 8192"));
  EXPECT_THAT(refusal(name, "layer_types", {"full_attention"}), Says("layer_types: found"));
  EXPECT_THAT(refusal(name, "layer_types",
                      {"full_attention", "chunked_attention", "full_attention", "full_attention"}),
              Says("chunked_attention"));
  EXPECT_THAT(refusal(name, "quantization_config", {{"quant_method", "gptq"}}), Says("gptq"));
  EXPECT_THAT(refusal(name, "hidden_act", "gelu"), Says("gelu"));
  EXPECT_THAT(refusal(name, "swiglu_limit", -1), Says("swiglu_limit: found -1"));
  EXPECT_THAT(refusal(name, "rope_scaling", nullptr), Says("rope_scaling: found null"));
  EXPECT_EQ(refusal(name, "quantization_config",
                    {{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"lm_head"}}}),
            "");
}

TEST(MoeSpec, WhatQwen3MoeCannotBeIsRefusedWithItsValue) {
  const char* const name = "qwen3-moe-fp32";
  EXPECT_THAT(refusal(name, "num_experts", 2), Says("num_experts_per_tok: found 3"));
  EXPECT_THAT(refusal(name, "num_local_experts", 4), Says("num_experts: found 8"));
  EXPECT_THAT(refusal(name, "decoder_sparse_step", 0), Says("decoder_sparse_step: found 0"));
  EXPECT_THAT(refusal(name, "mlp_only_layers", {4}), Says("mlp_only_layers"));
  EXPECT_THAT(refusal(name, "use_sliding_window", true), Says("use_sliding_window"));
  EXPECT_THAT(refusal(name, "quantization_config", {{"quant_method", "mxfp4"}}),
              Says("quantization_config"));
  EXPECT_THAT(refusal(name, "n_group", 2), Says("n_group"));
}

TEST(MoeSpec, MixtralHasItsOwnNamesAndAWindowWhereThereIsOne) {
  const ModelSpec spec = parse_spec(hub("mixtral-fp32").dump()).spec;
  EXPECT_EQ(spec.moe->moe_intermediate_size, 12);
  EXPECT_TRUE(spec.moe->norm_topk_prob);
  EXPECT_EQ(spec.moe->router_aux_loss_coef, 0.02);
  EXPECT_TRUE(spec.layer_types.empty());
  nlohmann::json config = hub("mixtral-fp32");
  config["sliding_window"] = 8;
  const ModelSpec slides = parse_spec(config.dump()).spec;
  EXPECT_TRUE(slides.is_sliding(0) && slides.is_sliding(3));
  EXPECT_EQ(slides.sliding_window, 8);
  EXPECT_EQ(parse_spec(config_json(slides)).spec, slides);
}

TEST(MoeSpec, WhatMixtralCannotBeIsRefusedWithItsValue) {
  const char* const name = "mixtral-fp32";
  EXPECT_THAT(refusal(name, "router_jitter_noise", 0.1), Says("router_jitter_noise: found 0.1"));
  EXPECT_THAT(refusal(name, "attention_bias", true), Says("attention_bias: found true"));
  EXPECT_THAT(refusal(name, "num_experts_per_tok", 9), Says("num_experts_per_tok: found 9"));
  EXPECT_THAT(refusal(name, "sliding_window", 0), Says("sliding_window: found 0"));
  EXPECT_THAT(refusal(name, "hidden_act", "gelu"), Says("gelu"));
}

TEST(MoeSpec, DenseLayersAmongThoseWithExpertsHaveAnMlp) {
  nlohmann::json config = hub("qwen3-moe-fp32");
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3};
  const ModelSpec spec = parse_spec(config.dump()).spec;
  EXPECT_EQ(routed_experts(spec).layers, (Shape{1}));
  std::map<std::string, ParameterSpec> rows;
  for (const ParameterSpec& row : describe(spec).parameters) rows.emplace(row.name, row);
  EXPECT_EQ(rows.count("model.layers.0.mlp.gate_proj.weight"), 1U);
  EXPECT_EQ(rows.count("model.layers.0.mlp.gate.weight"), 0U);
  EXPECT_EQ(rows.at("model.layers.1.mlp.experts.gate_up_proj").shape, (Shape{8, 32, 32}));
  EXPECT_EQ(rows.at("model.layers.1.mlp.experts.gate_up_proj").stacked.at(3),
            "model.layers.1.mlp.experts.1.up_proj.weight");
  EXPECT_EQ(rows.count("model.layers.3.mlp.down_proj.weight"), 1U);
  EXPECT_EQ(parse_spec(config_json(spec)).spec, spec);
}

TEST(MoeSpec, OnlyChosenExpertsAreActive) {
  const ModelSpec spec = parse_spec(hub("qwen3-moe-fp32").dump()).spec;
  std::int64_t active = 0;
  for (const ParameterSpec& row : describe(spec).parameters) active += active_numel(spec, row);
  // A layer: q, k, v, o, their norms, router, 3 experts of 3 projections, two norms.
  const std::int64_t layer =
      64 * 32 + 2 * 32 * 32 + 32 * 64 + 2 * 16 + 8 * 32 + 3 * 3 * 16 * 32 + 2 * 32;
  EXPECT_EQ(active, 4 * layer + 32 + 128 * 32);
}

// The published models as configs/ has them.
TEST(MoeSpec, PublishedConfigsAreRead) {
  const std::filesystem::path models = std::filesystem::path(TESSERA_CONFIGS) / "models";
  const auto numel = [&](const char* name) {
    return total_numel(
        describe(parse_spec(file_text((models / name).string(), "config.json")).spec).parameters);
  };
  EXPECT_EQ(numel("qwen3-30b-a3b"), 30'532'122'624);
  EXPECT_EQ(numel("mixtral-8x7b"), 46'702'792'704);
  EXPECT_EQ(numel("gpt-oss-20b"), 20'914'757'184);
  EXPECT_EQ(numel("deepseek-v2-lite"), 15'706'484'224);
  EXPECT_EQ(numel("deepseek-v2"), 235'741'434'880);
  EXPECT_EQ(numel("deepseek-v3"), 671'026'404'352);
  EXPECT_EQ(numel("kimi-k2"), 1'026'408'209'408);
  EXPECT_EQ(numel("qwen3-next-80b-a3b"), 79'674'391'296);
  EXPECT_EQ(numel("glm-4.5-air"), 106'852'245'504);
  EXPECT_EQ(numel("llama4-scout"), 107'769'861'120);
  EXPECT_EQ(numel("gemma4-26b-a4b"), 25'805'933'872);
}

// The config.json of DeepSeek V3, in both spellings, and what is refused in it.
using nlohmann::json;

constexpr ConfigOfFolder kDeepseekV3("deepseek-v3-fp32");

TEST(DeepseekV3Config, SaysLatentsSigmoidsAndGroups) {
  const ModelSpec spec = kDeepseekV3.spec();
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
  EXPECT_FALSE(kDeepseekV3.spec({{"norm_topk_prob", false}}).moe->norm_topk_prob);
}

// Kimi K2's files have another model_type; the written one is that of the classes, which
// transformers knows.
TEST(DeepseekV3Config, KimiK2IsTheSameFamily) {
  const ConfigOfFolder kimi("kimi-k2-fp32");
  const ModelSpec spec = kimi.spec();
  EXPECT_EQ(kimi.json().at("model_type"), "kimi_k2");
  EXPECT_EQ(spec.family, Family::kDeepseekV3);
  EXPECT_EQ(spec, parse_spec(file_text("kimi-k2-fp32", "config.json")).spec);
  EXPECT_EQ(spec.moe->n_group, 1);
  EXPECT_EQ(spec.moe->routed_scaling_factor, 2.827);
  EXPECT_EQ(spec.rope.yarn.beta_fast, 1.0);
  const json written = json::parse(config_json(spec));
  EXPECT_EQ(written.at("model_type"), "deepseek_v3");
  EXPECT_EQ(parse_spec(written.dump()).spec, spec);
  EXPECT_THAT(kimi.refusal({{"model_type", "kimi_k3"}}), Says("deepseek_v3 or kimi_k2"));
}

TEST(DeepseekV3Config, WhatIsWrittenHasTheHubsKeys) {
  json hub = kDeepseekV3.json();
  // Only those published keys are left out that say nothing about the computation.
  for (const char* key : {"aux_loss_alpha", "seq_aux", "ep_size", "transformers_version"}) {
    hub.erase(key);
  }
  EXPECT_EQ(json::parse(config_json(kDeepseekV3.spec())), hub);
}

TEST(DeepseekV3Config, AbsentKeysTakeTransformersDefaults) {
  const ModelSpec spec = kDeepseekV3.spec_without(
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
  EXPECT_EQ(kDeepseekV3.spec({{"quantization_config", packed}, {"num_nextn_predict_layers", 1}}),
            kDeepseekV3.spec());
}

std::optional<std::int64_t> layer_of(const json& keys, std::string_view published) {
  json config = kDeepseekV3.json();
  config.erase("num_nextn_predict_layers");
  config.update(keys);
  return prediction_layer(parse_spec(config.dump()), published);
}

// The model has layers 0 to 2: a layer beyond the config's count is not taken for one that
// predicts.
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
  kDeepseekV3.expect_refused({
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
  const ModelDescription description = describe(kDeepseekV3.spec());
  ASSERT_EQ(description.buffers.size(), 2U);
  EXPECT_EQ(description.buffers.front(),
            (BufferSpec{"model.layers.1.mlp.gate.e_score_correction_bias", {12}}));
  EXPECT_TRUE(kDeepseekV3.spec().moe->has_stored_bias());
}

// The config.json of GLM 4.5, in both spellings, and what is refused in it.
constexpr ConfigOfFolder kGlm4("glm4-moe-fp32");

TEST(Glm4MoeConfig, SaysHalfTurnedHeadsBiasesAndSigmoids) {
  const ModelSpec spec = kGlm4.spec();
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
  json hub = kGlm4.json();
  hub.erase("transformers_version");
  json written = json::parse(config_json(kGlm4.spec()));
  EXPECT_EQ(written.at("bos_token_id"), nullptr);
  written.erase("bos_token_id");
  EXPECT_EQ(written, hub);
}

TEST(Glm4MoeConfig, AbsentKeysTakeTransformersDefaults) {
  const ModelSpec spec = kGlm4.spec_without(
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
  EXPECT_EQ(kGlm4.spec({{"partial_rotary_factor", 1.0}}).rope.partial_rotary_factor, 1.0);
}

TEST(Glm4MoeConfig, OtherMathsIsRefusedWithKeyAndValue) {
  kGlm4.expect_refused({
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
  json published = kGlm4.json();
  published["num_nextn_predict_layers"] = 1;
  const ParsedSpec parsed = parse_spec(published.dump());
  EXPECT_EQ(prediction_layer(parsed, "model.layers.4.embed_tokens.weight"), 4);
  EXPECT_EQ(prediction_layer(parsed, "model.layers.3.mlp.gate.weight"), std::nullopt);
  EXPECT_EQ(prediction_layer(parsed, "model.layers.5.mlp.gate.weight"), std::nullopt);
}

// The config.json of Llama 4's text model, in both spellings, and what is refused in it.
constexpr auto kChunked = LayerType::kChunked;
constexpr auto kFull = LayerType::kFull;

constexpr ConfigOfFolder kLlama4("llama4-text-fp32");

TEST(Llama4Config, SaysChunksTemperatureAndExpertsInTurn) {
  const ModelSpec spec = kLlama4.spec();
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
  EXPECT_EQ(routed_experts(spec).layers, (Shape{1, 3}));
}

TEST(Llama4Config, WhatIsWrittenIsReadAsTheSame) {
  kLlama4.expect_kept({json::object(),
                       {{"moe_layers", {0, 2, 3}}},
                       {{"moe_layers", {3}}},
                       {{"no_rope_layers", {1, 0, 1, 1}}},
                       {{"use_qk_norm", false}},
                       {{"attn_temperature_tuning", false}}});
}

TEST(Llama4Config, LayersMayBeListed) {
  EXPECT_EQ(routed_experts(kLlama4.spec({{"moe_layers", {0, 2, 3}}})).layers, (Shape{0, 2, 3}));
  EXPECT_EQ(routed_experts(kLlama4.spec({{"moe_layers", {3}}})).layers, (Shape{3}));
  EXPECT_EQ(kLlama4.spec({{"no_rope_layers", {1, 0, 1, 1}}}).layer_types,
            (std::vector{kChunked, kFull, kChunked, kChunked}));
  EXPECT_EQ(kLlama4.spec({{"no_rope_layer_interval", 2}}).layer_types,
            (std::vector{kChunked, kFull, kChunked, kFull}));
}

// As it is published: the text model inside one that sees images.
TEST(Llama4Config, AFolderThatSeesImagesHasTheTextModelInIt) {
  const json whole{{"architectures", {"Llama4ForConditionalGeneration"}},
                   {"boi_token_index", 5},
                   {"image_token_index", 6},
                   {"model_type", "llama4"},
                   {"text_config", kLlama4.json()},
                   {"tie_word_embeddings", false},
                   {"vision_config", {{"hidden_size", 8}}}};
  EXPECT_EQ(parse_spec(whole.dump()).spec, kLlama4.spec());
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
  EXPECT_EQ(kLlama4.spec({{"attn_temperature_tuning", 4}}), kLlama4.spec());
  EXPECT_FALSE(kLlama4.spec({{"attn_temperature_tuning", 0}}).chunked->attn_temperature_tuning);
}

TEST(Llama4Config, OtherMathsIsRefusedWithKeyAndValue) {
  kLlama4.expect_refused({
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
  for (const ParameterSpec& row : describe(kLlama4.spec()).parameters) {
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

// Naive: of one kind of layer, or of the keys that latent attention does not have.
TEST(ContextParallelism, ByHeadsDividesTheKeyAndValueHeadsOfEachKindOfLayer) {
  const ParallelDims four{.cp = 2, .tp = 2, .context_form = ContextForm::kHeads};
  const auto found = [&](const char* folder, const std::function<void(ModelSpec&)>& change) {
    ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
    change(spec);
    const ParallelDims gather{.cp = 2, .tp = 2};
    EXPECT_NO_THROW(check_degrees(spec, gather)) << folder;
    return refusal_of(ErrorKind::kConfig, [&] { check_degrees(spec, four); });
  };
  EXPECT_THAT(found("qwen3-moe-fp32", [](auto& spec) { spec.num_key_value_heads = 2; }),
              Says("context_parallel_form: found heads over context_parallel_degree 2 x "
                   "tensor_parallel_degree 2, expected a divisor of num_key_value_heads = 2",
                   "\"gather\""));
  EXPECT_EQ(found("qwen3-moe-fp32", [](auto& spec) { spec.num_key_value_heads = 4; }), "");
  EXPECT_EQ(found("deepseek-v2-fp32", [](auto& spec) { spec.num_key_value_heads = 2; }), "")
      << "4 heads, all with keys of their own";
  EXPECT_THAT(found("gemma4-fp32",
                    [](auto& spec) {
                      for (auto& layer : spec.gemma4->layers) layer.num_key_value_heads = 4;
                      spec.num_key_value_heads = 4;
                      spec.gemma4->layers.back().num_key_value_heads = 2;
                    }),
              Says("num_key_value_heads = 2"));
}

}  // namespace
}  // namespace tessera::models::moe_config_test
