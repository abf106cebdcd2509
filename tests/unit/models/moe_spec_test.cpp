// Families with experts as their config.json says: both spellings, what is refused, what is
// written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::moe_spec_test {
namespace {

using ::testing::HasSubstr;
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
      EXPECT_EQ(std::pair(sizes->num_experts, sizes->experts_per_token), std::pair(12L, 4L));
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
                                           "deepseek-v3-mixed", "glm4-moe-fp32", "glm4-moe-mixed",
                                           "llama4-text-fp32", "llama4-text-mixed", "gpt-oss-fp32",
                                           "gpt-oss-mixed", "qwen3-moe-fp32", "qwen3-moe-mixed",
                                           "mixtral-fp32", "mixtral-mixed"));

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
  EXPECT_THAT(refusal(name, "experts_per_token", 2), HasSubstr("experts_per_token: found 2"));
  EXPECT_THAT(refusal(name, "num_experts", 4), HasSubstr("num_experts: found 4"));
  EXPECT_THAT(refusal(name, "num_experts_per_tok", 9), HasSubstr("num_experts_per_tok: found 9"));
  EXPECT_THAT(refusal(name, "initial_context_length", 8192), HasSubstr("found 8192"));
  EXPECT_THAT(refusal(name, "layer_types", {"full_attention"}), HasSubstr("layer_types: found"));
  EXPECT_THAT(refusal(name, "layer_types",
                      {"full_attention", "chunked_attention", "full_attention", "full_attention"}),
              HasSubstr("chunked_attention"));
  EXPECT_THAT(refusal(name, "quantization_config", {{"quant_method", "gptq"}}), HasSubstr("gptq"));
  EXPECT_THAT(refusal(name, "hidden_act", "gelu"), HasSubstr("gelu"));
  EXPECT_THAT(refusal(name, "swiglu_limit", -1), HasSubstr("swiglu_limit: found -1"));
  EXPECT_THAT(refusal(name, "rope_scaling", nullptr), HasSubstr("rope_scaling: found null"));
  EXPECT_EQ(refusal(name, "quantization_config",
                    {{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"lm_head"}}}),
            "");
}

TEST(MoeSpec, WhatQwen3MoeCannotBeIsRefusedWithItsValue) {
  const char* const name = "qwen3-moe-fp32";
  EXPECT_THAT(refusal(name, "num_experts", 2), HasSubstr("num_experts_per_tok: found 3"));
  EXPECT_THAT(refusal(name, "num_local_experts", 4), HasSubstr("num_experts: found 8"));
  EXPECT_THAT(refusal(name, "decoder_sparse_step", 0), HasSubstr("decoder_sparse_step: found 0"));
  EXPECT_THAT(refusal(name, "mlp_only_layers", {4}), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(refusal(name, "use_sliding_window", true), HasSubstr("use_sliding_window"));
  EXPECT_THAT(refusal(name, "quantization_config", {{"quant_method", "mxfp4"}}),
              HasSubstr("quantization_config"));
  EXPECT_THAT(refusal(name, "n_group", 2), HasSubstr("n_group"));
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
  EXPECT_THAT(refusal(name, "router_jitter_noise", 0.1),
              HasSubstr("router_jitter_noise: found 0.1"));
  EXPECT_THAT(refusal(name, "attention_bias", true), HasSubstr("attention_bias: found true"));
  EXPECT_THAT(refusal(name, "num_experts_per_tok", 9), HasSubstr("num_experts_per_tok: found 9"));
  EXPECT_THAT(refusal(name, "sliding_window", 0), HasSubstr("sliding_window: found 0"));
  EXPECT_THAT(refusal(name, "hidden_act", "gelu"), HasSubstr("gelu"));
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
  EXPECT_EQ(numel("glm-4.5-air"), 106'852'245'504);
  EXPECT_EQ(numel("llama4-scout"), 107'769'861'120);
  EXPECT_EQ(numel("gemma4-26b-a4b"), 25'805'933'872);
}

}  // namespace
}  // namespace tessera::models::moe_spec_test
