// What a config.json of Gemma 3 says of its text model, alone and in a folder with a vision tower,
// in both spellings, and what is refused in it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::gemma3_config_test {
namespace {

using ::testing::HasSubstr;
using enum LayerType;

constexpr ConfigOfFolder kConfig("gemma3-text-fp32");

/// A folder of the whole model, as published: what is transformers' default is left out.
nlohmann::json whole() {
  return nlohmann::json::parse(R"({
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
      "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
      "sliding_window": 1024},
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "image_size": 896}})");
}

TEST(Gemma3Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"gemma3-text-fp32", "gemma3-text-mixed"}) {
    const ModelSpec spec = parse_spec(file_text(folder, "config.json")).spec;
    EXPECT_EQ(spec, parse_spec(file_text(folder, "config.hub.json")).spec);
    EXPECT_EQ(spec.family, Family::kGemma3);
    EXPECT_EQ(spec.layer_types, (std::vector{kSliding, kSliding, kFull, kSliding}));
    EXPECT_EQ(spec.sliding_window, 6);
    EXPECT_EQ(spec.rope.theta, 1e6);
    EXPECT_EQ(spec.rope.type, nn::RopeType::kLinear);
    EXPECT_EQ(spec.rope.factor, 8.0);
    EXPECT_EQ(*spec.sliding_rope, (nn::RopeOptions{.theta = 1e4}));
    EXPECT_EQ(spec.query_pre_attn_scalar, 24.0);
    EXPECT_TRUE(spec.tie_word_embeddings);
    EXPECT_EQ(spec.pad_token_id, 0);
  }
}

TEST(Gemma3Config, AFolderOfTheWholeModelGivesItsTextModel) {
  const ModelSpec spec = parse_spec(whole().dump()).spec;
  EXPECT_EQ(spec.family, Family::kGemma3);
  EXPECT_EQ(spec.vocab_size, 262208);
  EXPECT_EQ(spec.num_attention_heads, 8);
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.head_dim, 256);
  EXPECT_EQ(spec.num_hidden_layers, 34);
  EXPECT_EQ(spec.eos_token_ids, (std::vector<std::int64_t>{1, 106}));
  EXPECT_EQ(spec.dtype, DType::kBFloat16);
  EXPECT_EQ(spec.layer_types.at(5), kFull);
  EXPECT_EQ(spec.layer_types.at(6), kSliding);
  EXPECT_EQ(spec.query_pre_attn_scalar, 256.0);
  // Published as 4.3 billion, of which the tower and its projector are 0.42.
  EXPECT_EQ(total_numel(describe(spec).parameters), 3'880'263'168);
  EXPECT_EQ(parse_spec(config_json(spec)).spec, spec);
}

TEST(Gemma3Config, WhatStandsBesideTheTextModelIsKnownOrRefused) {
  nlohmann::json config = whole();
  config["mm_hidden_act"] = "gelu";
  EXPECT_THAT(refusal_of(config.dump()), HasSubstr("mm_hidden_act"));
  config = whole();
  config.erase("text_config");
  EXPECT_THAT(refusal_of(config.dump()), HasSubstr("text_config: found nothing"));
  config = whole();
  config["text_config"]["use_bidirectional_attention"] = true;
  EXPECT_THAT(refusal_of(config.dump()), HasSubstr("use_bidirectional_attention: found true"));
  config = whole();
  config["text_config"]["model_type"] = "gemma2";
  EXPECT_THAT(refusal_of(config.dump()), HasSubstr("gemma2"));
}

TEST(Gemma3Config, TensorsOfTheTowerAreNoneOfTheTextModels) {
  const auto name = traits(Family::kGemma3).module_name;
  EXPECT_EQ(name("language_model.model.layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(name("model.language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(name("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(name("vision_tower.vision_model.embeddings.patch_embedding.weight"), "");
  EXPECT_EQ(name("model.multi_modal_projector.mm_soft_emb_norm.weight"), "");
}

TEST(Gemma3Config, TheListOfLayersCountsBeforeThePattern) {
  EXPECT_EQ(kConfig.spec({{"sliding_window_pattern", 2}}).layer_types,
            (std::vector{kSliding, kFull, kSliding, kFull}));
  const nlohmann::json list{"full_attention", "sliding_attention", "full_attention",
                            "full_attention"};
  EXPECT_EQ(kConfig.spec({{"layer_types", list}}).layer_types,
            (std::vector{kFull, kSliding, kFull, kFull}));
}

TEST(Gemma3Config, WhatIsWrittenIsReadAsTheSame) {
  kConfig.expect_kept(
      {nlohmann::json::object(),
       {{"pad_token_id", nullptr}},
       {{"rope_scaling", nullptr}, {"tie_word_embeddings", false}},
       {{"query_pre_attn_scalar", 168.5}, {"rope_local_base_freq", 5000.0}},
       {{"layer_types",
         {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}}}});
}

TEST(Gemma3Config, WhatIsNotSupportedIsRefusedByName) {
  EXPECT_THAT(kConfig.refusal({{"final_logit_softcapping", 30.0}}),
              HasSubstr("final_logit_softcapping"));
  EXPECT_THAT(kConfig.refusal({{"attn_logit_softcapping", 50.0}}),
              HasSubstr("attn_logit_softcapping"));
  EXPECT_THAT(kConfig.refusal({{"hidden_activation", "gelu"}}), HasSubstr("hidden_activation"));
  EXPECT_THAT(kConfig.refusal({{"query_pre_attn_scalar", 0}}),
              HasSubstr("query_pre_attn_scalar: found 0"));
  EXPECT_THAT(kConfig.refusal({{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}}}),
              HasSubstr("dynamic"));
  // transformers reads rope_type alone, and would compute the default rope.
  EXPECT_THAT(kConfig.refusal({{"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}}),
              HasSubstr("rope_scaling.type: found \"yarn\", expected rope_type in its place"));
  EXPECT_THAT(kConfig.refusal({{"rope_scaling", nullptr},
                               {"rope_parameters",
                                {{"full_attention", {{"type", "linear"}, {"factor", 2.0}}}}}}),
              HasSubstr("rope_parameters.full_attention.type: found \"linear\""));
  const nlohmann::json named{{"full_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}};
  EXPECT_EQ(kConfig.spec({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                          {"rope_parameters", named}}),
            kConfig.spec({{"rope_scaling", nullptr}, {"rope_parameters", named}}));
  EXPECT_THAT(
      kConfig.refusal({{"rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}}}),
      HasSubstr("they differ in rope_type linear beside default"));
  EXPECT_THAT(kConfig.refusal({{"layer_types", {"sliding_attention"}}}), HasSubstr("layer_types"));
}

}  // namespace
}  // namespace tessera::models::gemma3_config_test
