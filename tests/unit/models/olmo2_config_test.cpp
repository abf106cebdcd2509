// What a config.json of OLMo 2 says, in both spellings, and what is refused in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/description.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::olmo2_config_test {
namespace {

using ::testing::HasSubstr;

constexpr ConfigOfFolder kConfig("olmo2-fp32");

TEST(Olmo2Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"olmo2-fp32", "olmo2-mixed"}) {
    const ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
    EXPECT_EQ(spec, parse_spec(file_text(folder, "config.hub.json")).spec);
    EXPECT_EQ(spec.family, Family::kOlmo2);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_EQ(spec.rope.theta, 500000.0);
    EXPECT_EQ(spec.pad_token_id, 1);
  }
}

TEST(Olmo2Config, AbsentKeysAreTransformersDefaults) {
  const ModelSpec spec =
      kConfig.spec_without({"num_key_value_heads", "rms_norm_eps", "pad_token_id", "rope_theta",
                            "max_position_embeddings"});
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.pad_token_id, 1);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_EQ(spec.max_position_embeddings, 2048);
  EXPECT_EQ(kConfig.spec({{"pad_token_id", nullptr}}).pad_token_id, std::nullopt);
}

TEST(Olmo2Config, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept({nlohmann::json::object(),
                       {{"pad_token_id", nullptr}},
                       {{"attention_bias", true}, {"tie_word_embeddings", true}},
                       {{"rope_scaling", {{"factor", 2.0}, {"rope_type", "linear"}}}}});
}

TEST(Olmo2Config, NormsStandBehindAndThoseOfHeadsAreOfAllTogether) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const ParameterSpec& row : describe(kConfig.spec()).parameters) shapes[row.name] = row.shape;
  EXPECT_EQ(shapes.count("model.layers.0.input_layernorm.weight"), 0U);
  EXPECT_EQ(shapes.count("model.layers.0.post_feedforward_layernorm.weight"), 1U);
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.q_norm.weight"), std::vector<std::int64_t>{32});
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.k_norm.weight"), std::vector<std::int64_t>{16});
}

TEST(Olmo2Config, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_THAT(kConfig.refusal({{"hidden_act", "gelu"}}), HasSubstr("hidden_act: found \"gelu\""));
  EXPECT_THAT(kConfig.refusal({{"layer_types", {"sliding_attention"}}}), HasSubstr("layer_types"));
  EXPECT_THAT(kConfig.refusal({{"clip_qkv", 8.0}}), HasSubstr("clip_qkv"));
  EXPECT_THAT(kConfig.refusal({{"quantization_config", {{"quant_method", "fp8"}}}}),
              HasSubstr("quantization_config"));
}

}  // namespace
}  // namespace tessera::models::olmo2_config_test
