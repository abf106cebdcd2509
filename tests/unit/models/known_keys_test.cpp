// Keys of a config.json that no family reads: inert ones, values that mean "off", and the rest,
// drawn into the config of every family.
#include "models/keys/known_keys.h"

#include <nlohmann/json.hpp>
#include <random>

#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::known_keys_test {
namespace {

using nlohmann::json;
using ::testing::ElementsAreArray;

class KnownKeys : public ::testing::TestWithParam<const char*> {
 protected:
  json config() const { return ConfigOfFolder(GetParam()).json(); }
};

/// Whether a key that others do not know says something about models of this family.
bool is_own(const std::string& folder, std::string_view key) {
  return folder.starts_with("qwen3-next") && key == "shared_expert_intermediate_size";
}

/// As published folders and tools have them.
std::vector<std::pair<std::string, json>> extras(const std::string& folder) {
  std::vector<std::pair<std::string, json>> all{
      {"is_llama_config", true},
      {"transformers.js_config", {{"kv_cache_dtype", {{"q4f16", "float16"}}}}},
      {"unsloth_fixed", true},
      {"unsloth_version", "2026.7.1"},
      {"unsloth_training_statistics", json::array({1, 2})},
      {"_commit_hash", "0123abcd"},
      {"gradient_checkpointing", false},
      {"use_flash_attention_2", true},
      {"model_max_length", 4096},
      {"license", "apache-2.0"},
      {"min_p", 0.05},
      {"shared_expert_intermediate_size", 0},
      {"hidden_dropout", 0.0},
      {"ffn_dropout_rate", 0},
      {"mtp_num_layers", 0},
      {"num_mtp_modules", 0},
      {"loss_type", nullptr},
      {"quantization", nullptr}};
  std::erase_if(all, [&](const auto& extra) { return is_own(folder, extra.first); });
  return all;
}

TEST_P(KnownKeys, DrawnExtrasAreNamedOnceAndChangeNothing) {
  const ParsedSpec before = parse_spec(config().dump());
  EXPECT_THAT(before.ignored_keys, IsEmpty());
  std::mt19937_64 draw(20261128);
  for (int i = 0; i < 20; ++i) {
    auto drawn = extras(GetParam());
    std::erase_if(drawn, [&](const auto& extra) { return config().contains(extra.first); });
    std::ranges::shuffle(drawn, draw);
    drawn.resize(1 + draw() % drawn.size());
    json changed = config();
    std::vector<std::string> names;
    for (const auto& [key, value] : drawn) {
      changed[key] = value;
      names.push_back(json(key).dump());
    }
    std::ranges::sort(names);
    const ParsedSpec found = parse_spec(changed.dump());
    EXPECT_EQ(found.spec, before.spec);
    EXPECT_THAT(found.warnings, ElementsAreArray(before.warnings));
    EXPECT_THAT(found.ignored_keys, ElementsAreArray(names));
  }
}

std::string drawn_key(std::mt19937_64& draw) {
  std::string key = "x_";
  for (int letter = 0; letter < 12; ++letter) key += static_cast<char>('a' + draw() % 26);
  return key;
}

TEST_P(KnownKeys, OfAnUnknownKeyTheValuesThatMeanOffAreIgnoredByName) {
  std::mt19937_64 draw(20261129);
  const ParsedSpec before = parse_spec(config().dump());
  for (const json& value : {json(nullptr), json(false), json::object(), json::array()}) {
    const std::string key = drawn_key(draw);
    json changed = config();
    changed[key] = value;
    const ParsedSpec found = parse_spec(changed.dump());
    EXPECT_EQ(found.spec, before.spec) << value;
    EXPECT_THAT(found.ignored_keys, ElementsAreArray({json(key).dump()})) << value;
  }
}

// A 0 may matter, and so does every value of what a family cannot be without.
TEST_P(KnownKeys, OfAnUnknownKeyEveryOtherValueIsRefused) {
  std::mt19937_64 draw(20261129);
  const json values[] = {true, 0, 1.0, "", "off", {{"a", nullptr}}, json::array({false})};
  for (const json& value : values) {
    const std::string key = drawn_key(draw);
    json changed = config();
    changed[key] = value;
    EXPECT_THAT(config_refusal(changed.dump()), Says(key)) << value;
  }
  for (const char* key : {"causal", "is_causal", "use_rope"}) {
    json changed = config();
    changed[key] = false;
    EXPECT_THAT(config_refusal(changed.dump()), Says(key));
  }
}

/// Whether the key has no meaning in published files of this family, whose classes do not read it.
bool says_nothing(const std::string& folder, std::string_view key) {
  return folder.starts_with("smollm3") && key == "pretraining_tp";
}

TEST_P(KnownKeys, OtherValuesThanOffAreRefused) {
  const std::pair<const char*, json> cases[] = {{"shared_expert_intermediate_size", 512},
                                                {"hidden_dropout", 0.1},
                                                {"alibi", true},
                                                {"clip_qkv", 8.0},
                                                {"quantization", {{"bits", 4}}},
                                                {"lm_head_multiplier", 12.0},
                                                {"rope_interleaved", true},
                                                {"pretraining_tp", 2},
                                                {"is_decoder", true},
                                                {"loss_type", "ForMaskedLM"}};
  for (const auto& [key, value] : cases) {
    if (says_nothing(GetParam(), key) || is_own(GetParam(), key)) continue;
    json changed = config();
    changed[key] = value;
    EXPECT_THAT(config_refusal(changed.dump()), Says(key)) << value;
  }
}

// No flag permits a key that would be computed wrongly.
TEST_P(KnownKeys, WhatMattersIsRefusedForAnyCaller) {
  const std::pair<const char*, json> cases[] = {{"pretraining_tp", 2},
                                                {"is_encoder_decoder", true},
                                                {"pruned_heads", {{"0", {1}}}},
                                                {"quantization_config", {{"quant_method", "awq"}}}};
  for (const auto& [key, value] : cases) {
    if (says_nothing(GetParam(), key)) continue;
    json changed = config();
    changed[key] = value;
    EXPECT_THROW(parse_spec(changed.dump(), {.unknown_keys = UnknownKeys::kWarn}), Error) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(, KnownKeys,
                         ::testing::Values("llama-fp32", "qwen2-fp32", "qwen3-fp32", "mistral-fp32",
                                           "olmo2-fp32", "gemma3-text-fp32", "qwen3-moe-fp32",
                                           "mixtral-fp32", "gpt-oss-fp32", "deepseek-v2-fp32",
                                           "deepseek-v3-fp32", "glm4-moe-fp32", "llama4-text-fp32",
                                           "gemma4-fp32", "gpt2-fp32", "granite-fp32",
                                           "smollm3-fp32", "phi3-fp32", "qwen3-next-fp32",
                                           "qwen3-5-text-fp32", "nemotron-h-fp32"),
                         [](const auto& tested) {
                           std::string name = tested.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

TEST(KnownKey, ANormOfQueriesAndKeysMayBeSaidAsTheFamilyHasIt) {
  const std::pair<const char*, bool> families[] = {
      {"qwen3-fp32", true},  {"qwen3-moe-fp32", true}, {"olmo2-fp32", true},
      {"llama-fp32", false}, {"mistral-fp32", false},  {"mixtral-fp32", false},
      {"qwen2-fp32", false}, {"gpt-oss-fp32", false},  {"gemma3-text-fp32", true}};
  for (const auto& [folder, norm] : families) {
    const ConfigOfFolder config(folder);
    for (const char* key : {"use_qk_norm", "qk_norm", "qk_layernorm"}) {
      EXPECT_EQ(config.refusal({{key, norm}}), "") << folder;
      EXPECT_THAT(config.refusal({{key, !norm}}),
                  AllOf(Says(key), Says("it matters"), Not(Says("unknown"))))
          << folder;
    }
  }
}

TEST(KnownKey, BiasesMayBeSaidAsTheModelHasThem) {
  EXPECT_EQ(ConfigOfFolder("qwen3-moe-fp32").refusal({{"qkv_bias", false}}), "");
  EXPECT_EQ(ConfigOfFolder("qwen2-fp32").refusal({{"qkv_bias", true}}), "");
  EXPECT_THAT(ConfigOfFolder("qwen3-moe-fp32").refusal({{"qkv_bias", true}}),
              Says("qkv_bias", "it matters"));
  EXPECT_EQ(ConfigOfFolder("qwen3-moe-fp32").refusal({{"use_bias", false}}), "");
  EXPECT_THAT(ConfigOfFolder("qwen2-fp32").refusal({{"use_bias", false}}), Says("use_bias"));
}

TEST(KnownKey, NestedConfigsAreSortedAlike) {
  json gemma4 = ConfigOfFolder("gemma4-fp32").json();
  gemma4["text_config"]["unsloth_fixed"] = true;
  EXPECT_THAT(parse_spec(gemma4.dump()).ignored_keys,
              ElementsAreArray({"text_config.\"unsloth_fixed\""}));
  gemma4["text_config"]["quantization_config"] = {{"quant_method", "awq"}};
  EXPECT_THAT(config_refusal(gemma4.dump()), Says("text_config.quantization_config"));
}

}  // namespace
}  // namespace tessera::models::known_keys_test
