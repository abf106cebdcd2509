// Gemma 4's config.json: both spellings, defaults, refusals.
#include <nlohmann/json.hpp>

#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::gemma4_config_test {
namespace {

using Json = nlohmann::json;

Json written() { return Json::parse(file_text("gemma4-fp32", "config.json")); }

/// The least that describes a model: every other key takes its default.
Json least() {
  return Json::parse(R"({"architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4", "text_config": {"hidden_size_per_layer_input": 0}})");
}

ModelSpec parse(const Json& json) { return parse_spec(json.dump()).spec; }

std::string refusal(const Json& json) { return config_refusal(json.dump()); }

/// The fixture with one key changed, named by its path.
std::string refusal(const std::string& pointer, const Json& value) {
  Json json = written();
  json[Json::json_pointer(pointer)] = value;
  return refusal(json);
}

TEST(Gemma4Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"gemma4-fp32", "gemma4-mixed"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(parse_spec(config_json(spec)).spec, spec) << config_json(spec);
  }
  const ModelSpec spec = parse(written());
  EXPECT_EQ(spec.family, Family::kGemma4);
  const Gemma4Spec& gemma = *spec.gemma4;
  ASSERT_EQ(gemma.layers.size(), 4u);
  EXPECT_EQ(gemma.layers[0], (Gemma4Layer{LayerType::kSliding, 8, 2, false}));
  EXPECT_EQ(gemma.layers[3], (Gemma4Layer{LayerType::kFull, 16, 1, true}));
  EXPECT_EQ(gemma.image_attention, ImageAttention::kBothWays);
  EXPECT_EQ(gemma.full_rope,
            (nn::RopeOptions{
                .theta = 1e6, .type = nn::RopeType::kProportional, .partial_rotary_factor = 0.25}));
  ASSERT_TRUE(spec.moe.has_value());
  EXPECT_EQ(spec.moe->num_experts, 8);
  EXPECT_EQ(spec.moe->experts_per_token, 2);
  EXPECT_EQ(spec.moe->moe_intermediate_size, 16);
  EXPECT_EQ(routed_experts(spec).layers, (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(gemma.final_logit_softcapping, 30.0);
  ASSERT_TRUE(gemma.vision.has_value());
  EXPECT_EQ(gemma.vision->position_embedding_size, 16);
  EXPECT_TRUE(gemma.vision->standardize);
  EXPECT_EQ(gemma.image_token_id, 120);
  EXPECT_TRUE(spec.tie_word_embeddings);
}

TEST(Gemma4Config, AbsentKeysTakeTransformersDefaults) {
  const ModelSpec spec = parse(least());
  const Gemma4Spec& gemma = *spec.gemma4;
  EXPECT_EQ(spec.vocab_size, 262144);
  EXPECT_EQ(spec.hidden_size, 2304);
  EXPECT_EQ(spec.pad_token_id, 0);
  EXPECT_EQ(gemma.layers.size(), 30u);
  EXPECT_EQ(gemma.layers[4], (Gemma4Layer{LayerType::kSliding, 256, 4, false}));
  EXPECT_EQ(gemma.layers[5], (Gemma4Layer{LayerType::kFull, 512, 4, false}));
  EXPECT_EQ(spec.rope, (nn::RopeOptions{.theta = 1e4}));
  EXPECT_EQ(gemma.full_rope.type, nn::RopeType::kProportional);
  EXPECT_EQ(gemma.image_attention, ImageAttention::kCausal);
  EXPECT_FALSE(spec.moe || gemma.vision || gemma.final_logit_softcapping);
  EXPECT_EQ(gemma.image_token_id, 258880);
  Json vision = least();
  vision["vision_config"] = Json::object();
  EXPECT_EQ(parse(vision).gemma4->vision, Gemma4Vision{});
  vision["vision_config"]["rope_parameters"] = {{"rope_type", "default"}};
  EXPECT_EQ(parse(vision).gemma4->vision, Gemma4Vision{});
}

TEST(Gemma4Config, TokensThatAreNullAreThoseThatTheModelHasNot) {
  Json json = written();
  for (const char* key : {"video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id",
                          "boa_token_id", "eoa_token_index"}) {
    json[key] = nullptr;
  }
  const ModelSpec spec = parse(json);
  EXPECT_EQ(spec.gemma4->video_token_id, std::nullopt);
  EXPECT_EQ(spec.gemma4->eoa_token_index, std::nullopt);
  EXPECT_EQ(spec.gemma4->image_token_id, 120);
  EXPECT_EQ(parse_spec(config_json(spec)).spec, spec) << "null is written, not the default";
}

TEST(Gemma4Config, GlobalKeysCountOnlyWhereTheyDoInTransformers) {
  Json json = least();
  json["text_config"]["num_global_key_value_heads"] = 2;
  EXPECT_EQ(parse(json).gemma4->layers[5].num_key_value_heads, 4) << "keys are not values";
  json["text_config"]["attention_k_eq_v"] = true;
  EXPECT_EQ(parse(json).gemma4->layers[5].num_key_value_heads, 2);
  EXPECT_EQ(parse(json).gemma4->layers[4].num_key_value_heads, 4);
  EXPECT_TRUE(parse(json).gemma4->layers[5].key_is_value);
  json["text_config"]["per_layer_config"] = Json::object();
  EXPECT_EQ(parse(json).gemma4->layers[5].num_key_value_heads, 4);
  EXPECT_EQ(parse(json).gemma4->layers[5].head_dim, 256);
}

TEST(Gemma4Config, TheLastLayerSeesEverythingForAnyList) {
  Json json = written();
  json["text_config"]["layer_types"][3] = "sliding_attention";
  EXPECT_EQ(parse(json), parse(written()));
}

TEST(Gemma4Config, WhatTheGlobalKeysCannotSayIsWrittenLayerByLayer) {
  Json json = written();
  json["text_config"]["per_layer_config"]["1"] = {{"num_key_value_heads", 4}};
  const ModelSpec spec = parse(json);
  EXPECT_EQ(spec.gemma4->layers[1].num_key_value_heads, 4);
  EXPECT_EQ(parse_spec(config_json(spec)).spec, spec) << config_json(spec);
  EXPECT_THAT(config_json(spec), Says("per_layer_config"));
  EXPECT_THAT(config_json(parse(written())), Says("global_head_dim"));
  EXPECT_THAT(config_json(parse(written())), Not(Says("per_layer_config")));
  const ModelSpec plain = parse(least());
  EXPECT_EQ(parse_spec(config_json(plain)).spec, plain) << config_json(plain);
}

// So transformers writes the numbers of layers.
TEST(Gemma4Config, NumbersOfLayersMayHaveTheDigitsOfTheirCount) {
  Json json = written();
  Json& text = json["text_config"];
  text["num_hidden_layers"] = 12;
  text.erase("layer_types");
  text["per_layer_config"] = {{"5", {{"head_dim", 16}}}, {"11", {{"head_dim", 16}}}};
  const ModelSpec spec = parse(json);
  text["per_layer_config"] = {{"05", {{"head_dim", 16}}}, {"11", {{"head_dim", 16}}}};
  EXPECT_EQ(parse(json), spec);
  text["per_layer_config"] = {{"5", {{"head_dim", 16}}}, {"05", {{"head_dim", 16}}}};
  EXPECT_THAT(refusal(json), Says("one each"));
}

TEST(Gemma4Config, DropoutIsAllowedWithoutTrainingAndWrittenAsItWas) {
  Json json = written();
  json["text_config"]["attention_dropout"] = 0.5;
  json["vision_config"]["attention_dropout"] = 0.25;
  EXPECT_THAT(refusal(json), Says("text_config.attention_dropout: found 0.5"));
  const SpecOptions reading{.purpose = Purpose::kInference};
  const ModelSpec spec = parse_spec(json.dump(), reading).spec;
  EXPECT_EQ(parse_spec(config_json(spec), reading).spec, spec);
  const Json again = Json::parse(config_json(spec));
  EXPECT_EQ(again["text_config"]["attention_dropout"], 0.5);
  EXPECT_EQ(again["vision_config"]["attention_dropout"], 0.25);
}

TEST(Gemma4Config, UnsupportedMathsIsRefusedWithKeyAndValue) {
  const std::pair<const char*, Json> cases[] = {
      {"/audio_config", Json::object({{"a", 1}})},
      {"/tie_word_embeddings", false},  // the text_config says true
      {"/text_config/dtype", "bfloat16"},
      {"/text_config/model_type", "gemma3_text"},
      {"/text_config/hidden_activation", "silu"},
      {"/text_config/attention_bias", true},
      {"/text_config/attention_dropout", 0.5},
      {"/text_config/use_bidirectional_attention", "all"},
      {"/text_config/hidden_size_per_layer_input", 256},
      {"/text_config/num_kv_shared_layers", 2},
      {"/text_config/top_k_experts", 9},
      {"/text_config/num_experts", nullptr},
      {"/text_config/pad_token_id", nullptr},
      {"/text_config/hidden_size", nullptr},
      {"/text_config/layer_types", Json::array({"full_attention"})},
      {"/text_config/layer_types/1", "chunked_attention"},
      {"/text_config/per_layer_config/4", Json::object()},
      {"/text_config/per_layer_config/03", Json::object()},
      {"/text_config/per_layer_config/2/sliding_window", 4},
      {"/text_config/per_layer_config/1/head_dim", 16},  // others of its type have 8
      {"/text_config/per_layer_config/3/head_dim", 15},
      {"/text_config/per_layer_config/3/num_key_value_heads", 3},
      {"/text_config/rope_parameters/full_attention/rope_type", "yarn"},
      {"/text_config/rope_parameters/full_attention", nullptr},
      {"/text_config/rope_parameters/sliding_attention/partial_rotary_factor", 0.5},
      {"/text_config/rope_parameters/sliding_attention/rope_theta", nullptr},
      {"/text_config/final_logit_softcapping", -30.0},
      {"/text_config/surprise", 1},
      {"/vision_config/use_clipped_linears", true},
      {"/vision_config/model_type", "siglip"},
      {"/vision_config/hidden_activation", "gelu"},
      {"/vision_config/head_dim", 6},
      {"/vision_config/hidden_size", std::int64_t{1} << 31},  // buffers of it are made at once
      {"/vision_config/num_key_value_heads", 3},
      {"/vision_config/rope_parameters/rope_type", "llama3"},
      {"/vision_config", 3},
  };
  for (const auto& [pointer, value] : cases) {
    const std::string path(pointer);
    const std::string message = refusal(path, value);
    EXPECT_NE(message, "") << path;
    if (value.is_primitive() && !value.is_null() && path != "/tie_word_embeddings") {
      EXPECT_THAT(message, Says(value.dump())) << path;
    }
  }
  Json per_layer = written();
  per_layer["text_config"].erase("hidden_size_per_layer_input");
  EXPECT_THAT(refusal(per_layer), Says("hidden_size_per_layer_input: found nothing"));
  Json no_text = written();
  no_text.erase("text_config");
  EXPECT_THAT(refusal(no_text), Says("text_config: found nothing"));
}

TEST(Gemma4Config, RelativesOfTheFamilyAreRefusedByName) {
  for (const char* name : {"Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"}) {
    EXPECT_THAT(refusal("/architectures", Json::array({name})), Says(name));
  }
  EXPECT_THAT(refusal("/model_type", "gemma4_text"), Says("gemma4_text"));
}

TEST(Gemma4Config, TheTowerIsFrozenUnlessAskedOtherwise) {
  EXPECT_EQ(traits(Family::kGemma4).frozen, std::vector<std::string>{"model.vision_tower"});
  EXPECT_TRUE(traits(Family::kQwen3).frozen.empty());
}

TEST(Gemma4Table, HasTheRowsOfThePublishedLayout) {
  const ModelSpec spec = parse(written());
  const auto table = describe(spec).parameters;
  const auto buffers = describe(spec).buffers;
  std::size_t aliases = 0;
  std::set<std::string> names;
  for (const ParameterSpec& row : table) {
    names.insert(row.name);
    if (!row.tied_to.empty()) ++aliases;
  }
  EXPECT_EQ(names.size(), table.size());
  EXPECT_EQ(aliases, 1u);
  EXPECT_EQ(table.size() - aliases, 86u + 28u);
  EXPECT_EQ(buffers.size(), 6u);
  const auto row = [&](const std::string& name) {
    for (const ParameterSpec& each : table) {
      if (each.name == name) return each;
    }
    ADD_FAILURE() << name;
    return ParameterSpec{};
  };
  using Shape = std::vector<std::int64_t>;
  const std::string layer = "model.language_model.layers.3.";
  EXPECT_EQ(row(layer + "self_attn.q_proj.weight").shape, (Shape{64, 32}));
  EXPECT_EQ(row(layer + "self_attn.k_proj.weight").shape, (Shape{16, 32}));
  EXPECT_FALSE(names.contains(layer + "self_attn.v_proj.weight"));
  EXPECT_EQ(row(layer + "experts.gate_up_proj").shape, (Shape{8, 32, 32}));
  EXPECT_EQ(row(layer + "experts.gate_up_proj").decay, DecayClass::kMatrix);
  EXPECT_EQ(row(layer + "router.scale").init, InitKind::kOnes);
  EXPECT_EQ(row(layer + "router.scale").decay, DecayClass::kNorm);
  EXPECT_EQ(row(layer + "router.proj.weight").unit, "model.language_model.layers.3");
  EXPECT_EQ(row("model.vision_tower.patch_embedder.position_embedding_table").init,
            InitKind::kOnes);
  EXPECT_EQ(row("lm_head.weight").tied_to, "model.language_model.embed_tokens.weight");
  EXPECT_EQ(buffers[0].name, "model.vision_tower.std_bias");
  EXPECT_EQ(buffers[5],
            (BufferSpec{"model.language_model.layers.3.layer_scalar", {1}, InitKind::kOnes}));
}

}  // namespace
}  // namespace tessera::models::gemma4_config_test
