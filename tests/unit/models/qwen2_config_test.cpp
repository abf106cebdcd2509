// What a config.json of Qwen2 says, in both spellings, and what is refused in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/description.h"
#include "models/model_spec.h"
#include "tessera/error.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::qwen2_config_test {
namespace {

using ::testing::HasSubstr;
using enum LayerType;

constexpr ConfigOfFolder kConfig("qwen2-fp32");

TEST(Qwen2Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"qwen2-fp32", "qwen2-mixed"}) {
    const ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
    EXPECT_EQ(spec, parse_spec(file_text(folder, "config.hub.json")).spec);
    EXPECT_EQ(spec.family, Family::kQwen2);
    EXPECT_TRUE(spec.attention_bias);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_TRUE(spec.layer_types.empty()) << "the window of the file is switched off";
    EXPECT_EQ(spec.sliding_window, 0);
  }
}

TEST(Qwen2Config, OnlyQueriesKeysAndValuesHaveABias) {
  std::vector<std::string> biases;
  for (const ParameterSpec& row : describe(kConfig.spec({{"num_hidden_layers", 1}})).parameters) {
    if (row.name.ends_with(".bias")) biases.push_back(row.name);
  }
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(biases, (std::vector<std::string>{attention + "q_proj.bias", attention + "k_proj.bias",
                                              attention + "v_proj.bias"}));
}

TEST(Qwen2Config, TheLastLayersSlideWhereTheWindowIsOn) {
  const ModelSpec spec = kConfig.spec({{"use_sliding_window", true}, {"max_window_layers", 3}});
  EXPECT_EQ(spec.layer_types, (std::vector<LayerType>{kFull, kFull, kFull, kSliding}));
  EXPECT_EQ(spec.sliding_window, 6);
  EXPECT_TRUE(kConfig.spec({{"use_sliding_window", true}}).layer_types.empty())
      << "all are below it";
  const ModelSpec none = kConfig.spec(
      {{"use_sliding_window", true}, {"max_window_layers", 0}, {"sliding_window", nullptr}});
  EXPECT_TRUE(none.layer_types.empty()) << "transformers has no window then, either";
}

TEST(Qwen2Config, LayerTypesWinOverMaxWindowLayers) {
  const ModelSpec spec = kConfig.spec(
      {{"use_sliding_window", true},
       {"layer_types",
        {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}}});
  EXPECT_EQ(spec.layer_types, (std::vector<LayerType>{kSliding, kFull, kSliding, kFull}));
}

TEST(Qwen2Config, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept({nlohmann::json::object(),
                       {{"tie_word_embeddings", true}},
                       {{"use_sliding_window", true}, {"max_window_layers", 1}}});
}

TEST(Qwen2Config, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_THAT(kConfig.refusal({{"attention_bias", false}}),
              HasSubstr("attention_bias: found false"));
  EXPECT_THAT(kConfig.refusal({{"use_mrope", true}}), HasSubstr("use_mrope: found true"));
  EXPECT_THAT(kConfig.refusal({{"mlp_bias", true}}), HasSubstr("mlp_bias"));
  EXPECT_THAT(kConfig.refusal({{"max_window_layers", -1}}),
              HasSubstr("max_window_layers: found -1"));
  const nlohmann::json slides = {"full_attention", "full_attention", "full_attention",
                                 "sliding_attention"};
  EXPECT_THAT(kConfig.refusal({{"layer_types", slides}}),
              HasSubstr("use_sliding_window: found false"));
  EXPECT_THAT(
      kConfig.refusal(
          {{"layer_types", slides}, {"use_sliding_window", true}, {"sliding_window", nullptr}}),
      HasSubstr("sliding_window: found null"));
}

}  // namespace
}  // namespace tessera::models::qwen2_config_test
