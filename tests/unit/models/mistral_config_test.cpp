// What a config.json of Mistral says, in both spellings, and what is refused in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::mistral_config_test {
namespace {

using ::testing::HasSubstr;

constexpr ConfigOfFolder kConfig("mistral-fp32");

TEST(MistralConfig, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"mistral-fp32", "mistral-mixed"}) {
    const ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
    EXPECT_EQ(spec, parse_spec(file_text(folder, "config.hub.json")).spec);
    EXPECT_EQ(spec.family, Family::kMistral);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_EQ(spec.sliding_window, 8);
    EXPECT_EQ(spec.layer_types, std::vector<LayerType>(4, LayerType::kSliding));
  }
}

TEST(MistralConfig, NoWindowIsNullAndAnAbsentOneIsTheDefault) {
  EXPECT_TRUE(kConfig.spec({{"sliding_window", nullptr}}).layer_types.empty());
  EXPECT_EQ(kConfig.spec_without({"sliding_window"}).sliding_window, 4096);
}

TEST(MistralConfig, HeadsMayHaveASizeOfTheirOwn) {
  // As Mistral Nemo: head_dim is not hidden_size / num_attention_heads.
  EXPECT_EQ(kConfig.spec({{"head_dim", 16}}).head_dim, 16);
  EXPECT_EQ(kConfig.spec({{"head_dim", nullptr}}).head_dim, 8);
}

TEST(MistralConfig, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept({nlohmann::json::object(),
                       {{"sliding_window", nullptr}},
                       {{"head_dim", 16}, {"tie_word_embeddings", true}}});
}

TEST(MistralConfig, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_THAT(kConfig.refusal({{"attention_bias", true}}), HasSubstr("attention_bias: found true"));
  EXPECT_THAT(kConfig.refusal({{"sliding_window", 0}}), HasSubstr("sliding_window: found 0"));
  EXPECT_THAT(kConfig.refusal({{"use_sliding_window", false}}),
              HasSubstr("use_sliding_window: found false"));
  EXPECT_THAT(kConfig.refusal({{"layer_types", {"full_attention"}}}), HasSubstr("layer_types"));
  EXPECT_THAT(kConfig.refusal({{"quantization_config", {{"quant_method", "fp8"}}}}),
              HasSubstr("quantization_config"));
}

}  // namespace
}  // namespace tessera::models::mistral_config_test
