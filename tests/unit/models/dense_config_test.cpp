// The text model in a config.json of Gemma 3, alone and in a folder with a vision tower, in both
// spellings, and what is refused in it.

#include <nlohmann/json.hpp>

#include "models/adapters.h"
#include "models/description.h"
#include "models/family.h"
#include "models/model_spec.h"
#include "support/test.h"
#include "unit/models/config_of_folder.h"

namespace tessera::models::dense_config_test {
namespace {

using enum LayerType;

constexpr ConfigOfFolder kGemma3("gemma3-text-fp32");

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
    const ModelSpec spec = spec_in_both_spellings(folder);
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

TEST(Gemma3Config, KeysAroundTheTextModelAreKnownOrRefused) {
  nlohmann::json config = whole();
  config["mm_hidden_act"] = "gelu";
  EXPECT_THAT(config_refusal(config.dump()), Says("mm_hidden_act"));
  config = whole();
  config.erase("text_config");
  EXPECT_THAT(config_refusal(config.dump()), Says("text_config: found nothing"));
  config = whole();
  config["text_config"]["use_bidirectional_attention"] = true;
  EXPECT_THAT(config_refusal(config.dump()), Says("use_bidirectional_attention: found true"));
  config = whole();
  config["text_config"]["model_type"] = "gemma2";
  EXPECT_THAT(config_refusal(config.dump()), Says("gemma2"));
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
  EXPECT_EQ(kGemma3.spec({{"sliding_window_pattern", 2}}).layer_types,
            (std::vector{kSliding, kFull, kSliding, kFull}));
  const nlohmann::json list{"full_attention", "sliding_attention", "full_attention",
                            "full_attention"};
  EXPECT_EQ(kGemma3.spec({{"layer_types", list}}).layer_types,
            (std::vector{kFull, kSliding, kFull, kFull}));
}

TEST(Gemma3Config, WhatIsWrittenIsReadAsTheSame) {
  kGemma3.expect_kept(
      {nlohmann::json::object(),
       {{"pad_token_id", nullptr}},
       {{"rope_scaling", nullptr}, {"tie_word_embeddings", false}},
       {{"query_pre_attn_scalar", 168.5}, {"rope_local_base_freq", 5000.0}},
       {{"layer_types",
         {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}}}});
}

TEST(Gemma3Config, WhatIsNotSupportedIsRefusedByName) {
  kGemma3.expect_refused(
      {{"final_logit_softcapping", 30.0},
       {"attn_logit_softcapping", 50.0},
       {"hidden_activation", "gelu"},
       {"query_pre_attn_scalar", 0, "query_pre_attn_scalar: found 0"},
       {"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}, "dynamic"}});
  // transformers reads rope_type alone, and would compute the default rope.
  EXPECT_THAT(kGemma3.refusal({{"rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}}}),
              Says("rope_scaling.type: found \"yarn\", expected rope_type in its place"));
  EXPECT_THAT(kGemma3.refusal({{"rope_scaling", nullptr},
                               {"rope_parameters",
                                {{"full_attention", {{"type", "linear"}, {"factor", 2.0}}}}}}),
              Says("rope_parameters.full_attention.type: found \"linear\""));
  const nlohmann::json named{{"full_attention", {{"rope_type", "linear"}, {"factor", 2.0}}}};
  EXPECT_EQ(kGemma3.spec({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                          {"rope_parameters", named}}),
            kGemma3.spec({{"rope_scaling", nullptr}, {"rope_parameters", named}}));
  kGemma3.expect_refused({{"rope_parameters",
                           {{"full_attention", {{"rope_type", "default"}}}},
                           "they differ in rope_type: linear, but default"},
                          {"layer_types", {"sliding_attention"}}});
}

// The config.json of GPT-2, in both spellings, and what is refused in it.
constexpr const char* kDropouts[] = {"attn_pdrop", "embd_pdrop", "resid_pdrop"};

constexpr ConfigOfFolder kGpt2("gpt2-fp32");

TEST(Gpt2Config, BothSpellingsGiveTheSameSpec) {
  const ModelSpec spec = parse_spec(file_text("gpt2-fp32", "config.json")).spec;
  ModelSpec hub = parse_spec(file_text("gpt2-fp32", "config.hub.json")).spec;
  EXPECT_EQ(hub.dtype, std::nullopt) << "the published file names none";
  hub.dtype = spec.dtype;
  EXPECT_EQ(spec, hub);
  EXPECT_EQ(spec.family, Family::kGpt2);
  EXPECT_EQ(spec.head_dim, 8);
  EXPECT_EQ(spec.intermediate_size, 128);
  EXPECT_EQ(spec.max_position_embeddings, 32);
  EXPECT_TRUE(spec.tie_word_embeddings);
}

TEST(Gpt2Config, AbsentKeysAreTransformersDefaults) {
  const nlohmann::json bare{{"architectures", {"GPT2LMHeadModel"}}, {"model_type", "gpt2"}};
  const ModelSpec spec = parse_spec(bare.dump()).spec;
  // As published: 124 million.
  EXPECT_EQ(total_numel(describe(spec).parameters), 124'439'808);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
}

TEST(Gpt2Config, DropoutIsLeftOutInTrainingWhichIsSaidAndKept) {
  EXPECT_THAT(parse_spec(kGpt2.json().dump()).warnings, IsEmpty()) << "all are 0";
  nlohmann::json published = kGpt2.json(), absent = kGpt2.json();
  for (const char* key : kDropouts) published[key] = 0.1;
  for (const char* key : kDropouts) absent.erase(key);
  for (const nlohmann::json& config : {published, absent}) {
    const ParsedSpec found = parse_spec(config.dump());
    EXPECT_THAT(found.warnings,
                ElementsAre(Says("attn_pdrop = 0.1, embd_pdrop = 0.1, resid_pdrop = 0.1")));
    const auto written = nlohmann::json::parse(config_json(found.spec));
    for (const char* key : kDropouts) EXPECT_EQ(written[key], 0.1) << key;
    const ParsedSpec read = parse_spec(config.dump(), {.purpose = Purpose::kInference});
    EXPECT_THAT(read.warnings, IsEmpty());
    EXPECT_EQ(read.spec, found.spec);
  }
  const auto one = parse_spec(changed_config("gpt2-fp32", {{"resid_pdrop", 0.25}})).warnings;
  EXPECT_THAT(one, ElementsAre(AllOf(Says("found resid_pdrop = 0.25:"), Not(Says("embd_pdrop")))));
  EXPECT_THAT(kGpt2.refusal({{"embd_pdrop", 1.5}}), Says("embd_pdrop: found 1.5"));
}

TEST(Gpt2Config, WhatIsWrittenIsReadAsTheSame) {
  kGpt2.expect_kept(
      {nlohmann::json::object(), {{"n_inner", 96}}, {{"tie_word_embeddings", false}}});
}

TEST(Gpt2Config, MasksAreNoTensorsOfTheModelAndAPrefixIsNone) {
  const auto name = traits(Family::kGpt2).module_name;
  EXPECT_EQ(name("transformer.h.0.attn.c_attn.weight"), "h.0.attn.c_attn.weight");
  EXPECT_EQ(name("h.0.attn.c_attn.bias"), "h.0.attn.c_attn.bias");
  EXPECT_EQ(name("wte.weight"), "wte.weight");
  EXPECT_EQ(name("h.0.attn.bias"), "");
  EXPECT_EQ(name("transformer.h.11.attn.masked_bias"), "");
}

TEST(Gpt2Config, MatricesStandAsInFilesAndHaveNoAdapters) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const ParameterSpec& row : describe(kGpt2.spec()).parameters) shapes[row.name] = row.shape;
  EXPECT_EQ(shapes.at("h.1.attn.c_attn.weight"), (std::vector<std::int64_t>{32, 96}));
  EXPECT_EQ(shapes.at("h.1.mlp.c_fc.weight"), (std::vector<std::int64_t>{32, 128}));
  EXPECT_EQ(shapes.at("wpe.weight"), (std::vector<std::int64_t>{32, 32}));
  EXPECT_REFUSED(kConfig, plan_lora(kGpt2.spec(), {.rank = 4, .targets = {"c_attn"}}),
                 "lora.rank: found 4");
}

TEST(Gpt2Config, RowsHaveNoMorePositionsThanWereLearned) {
  EXPECT_NO_THROW(check_learned_positions(kGpt2.spec(), 32));
  EXPECT_THROW(check_learned_positions(kGpt2.spec(), 33), Error);
  EXPECT_NO_THROW(
      check_learned_positions(parse_spec(file_text("llama-fp32", "config.json")).spec, 1'000'000));
}

TEST(Gpt2Config, WhatIsNotSupportedIsRefusedByName) {
  kGpt2.expect_refused({{"activation_function", "relu"},
                        {"scale_attn_weights", false},
                        {"scale_attn_by_inverse_layer_idx", true},
                        {"reorder_and_upcast_attn", true},
                        {"add_cross_attention", true},
                        {"n_head", 5, "n_embd: found 32"},
                        {"n_ctx", 16, "n_ctx: found 16"}});
}

// The config.json of Mistral, in both spellings, and what is refused in it.
constexpr ConfigOfFolder kMistral("mistral-fp32");

TEST(MistralConfig, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"mistral-fp32", "mistral-mixed"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(spec.family, Family::kMistral);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_EQ(spec.sliding_window, 8);
    EXPECT_EQ(spec.layer_types, std::vector<LayerType>(4, LayerType::kSliding));
  }
}

TEST(MistralConfig, NoWindowIsNullAndAnAbsentOneIsTheDefault) {
  EXPECT_TRUE(kMistral.spec({{"sliding_window", nullptr}}).layer_types.empty());
  EXPECT_EQ(kMistral.spec_without({"sliding_window"}).sliding_window, 4096);
}

TEST(MistralConfig, HeadsMayHaveASizeOfTheirOwn) {
  // As Mistral Nemo: head_dim is not hidden_size / num_attention_heads.
  EXPECT_EQ(kMistral.spec({{"head_dim", 16}}).head_dim, 16);
  EXPECT_EQ(kMistral.spec({{"head_dim", nullptr}}).head_dim, 8);
}

TEST(MistralConfig, WhatIsWrittenIsReadAsTheSame) {
  kMistral.expect_kept({nlohmann::json::object(),
                        {{"sliding_window", nullptr}},
                        {{"head_dim", 16}, {"tie_word_embeddings", true}}});
}

TEST(MistralConfig, WhatIsNotSupportedIsRefusedByName) {
  kMistral.expect_refused({{"attention_bias", true, "attention_bias: found true"},
                           {"sliding_window", 0, "sliding_window: found 0"},
                           {"use_sliding_window", false, "use_sliding_window: found false"},
                           {"layer_types", {"full_attention"}},
                           {"quantization_config", {{"quant_method", "fp8"}}}});
}

// The config.json of OLMo 2, in both spellings, and what is refused in it.
constexpr ConfigOfFolder kOlmo2("olmo2-fp32");

TEST(Olmo2Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"olmo2-fp32", "olmo2-mixed"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(spec.family, Family::kOlmo2);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_EQ(spec.rope.theta, 500000.0);
    EXPECT_EQ(spec.pad_token_id, 1);
  }
}

TEST(Olmo2Config, AbsentKeysAreTransformersDefaults) {
  const ModelSpec spec = kOlmo2.spec_without({"num_key_value_heads", "rms_norm_eps", "pad_token_id",
                                              "rope_theta", "max_position_embeddings"});
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.pad_token_id, 1);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_EQ(spec.max_position_embeddings, 2048);
  EXPECT_EQ(kOlmo2.spec({{"pad_token_id", nullptr}}).pad_token_id, std::nullopt);
}

TEST(Olmo2Config, WhatIsWrittenIsReadAsTheSame) {
  kOlmo2.expect_kept({nlohmann::json::object(),
                      {{"pad_token_id", nullptr}},
                      {{"attention_bias", true}, {"tie_word_embeddings", true}},
                      {{"rope_scaling", {{"factor", 2.0}, {"rope_type", "linear"}}}}});
}

TEST(Olmo2Config, NormsStandBehindAndThoseOfHeadsAreOfAllTogether) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const ParameterSpec& row : describe(kOlmo2.spec()).parameters) shapes[row.name] = row.shape;
  EXPECT_EQ(shapes.count("model.layers.0.input_layernorm.weight"), 0U);
  EXPECT_EQ(shapes.count("model.layers.0.post_feedforward_layernorm.weight"), 1U);
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.q_norm.weight"), std::vector<std::int64_t>{32});
  EXPECT_EQ(shapes.at("model.layers.0.self_attn.k_norm.weight"), std::vector<std::int64_t>{16});
}

TEST(Olmo2Config, WhatIsNotSupportedIsRefusedByName) {
  kOlmo2.expect_refused({{"hidden_act", "gelu", "hidden_act: found \"gelu\""},
                         {"layer_types", {"sliding_attention"}},
                         {"clip_qkv", 8.0},
                         {"quantization_config", {{"quant_method", "fp8"}}}});
}

// The config.json of Qwen2, in both spellings, and what is refused in it.
constexpr ConfigOfFolder kQwen2("qwen2-fp32");

TEST(Qwen2Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"qwen2-fp32", "qwen2-mixed"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(spec.family, Family::kQwen2);
    EXPECT_TRUE(spec.attention_bias);
    EXPECT_EQ(spec.head_dim, 8);
    EXPECT_TRUE(spec.layer_types.empty()) << "the window of the file is switched off";
    EXPECT_EQ(spec.sliding_window, 0);
  }
}

TEST(Qwen2Config, OnlyQueriesKeysAndValuesHaveABias) {
  std::vector<std::string> biases;
  for (const ParameterSpec& row : describe(kQwen2.spec({{"num_hidden_layers", 1}})).parameters) {
    if (row.name.ends_with(".bias")) biases.push_back(row.name);
  }
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_EQ(biases, (std::vector<std::string>{attention + "q_proj.bias", attention + "k_proj.bias",
                                              attention + "v_proj.bias"}));
}

TEST(Qwen2Config, TheLastLayersSlideWhereTheWindowIsOn) {
  const ModelSpec spec = kQwen2.spec({{"use_sliding_window", true}, {"max_window_layers", 3}});
  EXPECT_EQ(spec.layer_types, (std::vector<LayerType>{kFull, kFull, kFull, kSliding}));
  EXPECT_EQ(spec.sliding_window, 6);
  EXPECT_TRUE(kQwen2.spec({{"use_sliding_window", true}}).layer_types.empty())
      << "all are below it";
  const ModelSpec none = kQwen2.spec(
      {{"use_sliding_window", true}, {"max_window_layers", 0}, {"sliding_window", nullptr}});
  EXPECT_TRUE(none.layer_types.empty()) << "transformers has no window then, either";
}

TEST(Qwen2Config, LayerTypesWinOverMaxWindowLayers) {
  const ModelSpec spec = kQwen2.spec(
      {{"use_sliding_window", true},
       {"layer_types",
        {"sliding_attention", "full_attention", "sliding_attention", "full_attention"}}});
  EXPECT_EQ(spec.layer_types, (std::vector<LayerType>{kSliding, kFull, kSliding, kFull}));
}

TEST(Qwen2Config, WhatIsWrittenIsReadAsTheSame) {
  kQwen2.expect_kept({nlohmann::json::object(),
                      {{"tie_word_embeddings", true}},
                      {{"use_sliding_window", true}, {"max_window_layers", 1}}});
}

TEST(Qwen2Config, WhatIsNotSupportedIsRefusedByName) {
  kQwen2.expect_refused({{"attention_bias", false, "attention_bias: found false"},
                         {"use_mrope", true, "use_mrope: found true"},
                         {"mlp_bias", true},
                         {"max_window_layers", -1, "max_window_layers: found -1"}});
  const nlohmann::json slides = {"full_attention", "full_attention", "full_attention",
                                 "sliding_attention"};
  EXPECT_THAT(kQwen2.refusal({{"layer_types", slides}}), Says("use_sliding_window: found false"));
  EXPECT_THAT(
      kQwen2.refusal(
          {{"layer_types", slides}, {"use_sliding_window", true}, {"sliding_window", nullptr}}),
      Says("sliding_window: found null"));
}

constexpr ConfigOfFolder kGranite("granite-fp32");

TEST(GraniteConfig, TheFourNumbersAreReadAndWritten) {
  for (const char* folder : {"granite-fp32", "granite-mixed"}) {
    const ModelSpec spec = ConfigOfFolder(folder).spec();
    EXPECT_EQ(spec.family, Family::kGranite);
    const GraniteSpec expected{.embedding_multiplier = 12.0,
                               .attention_multiplier = 0.125,
                               .residual_multiplier = 0.22,
                               .logits_scaling = 8.0};
    EXPECT_EQ(spec.granite, expected);
  }
  // As transformers has them where a file is silent.
  const ModelSpec silent = kGranite.spec_without(
      {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"});
  EXPECT_EQ(silent.granite, GraniteSpec());
  kGranite.expect_kept({nlohmann::json::object(),
                        {{"attention_bias", true}, {"mlp_bias", true}},
                        {{"residual_multiplier", 0.5}, {"logits_scaling", 3.0}}});
}

TEST(GraniteConfig, WhatScalesNothingIsRefused) {
  kGranite.expect_refused({{"logits_scaling", 0.0, "logits_scaling: found 0"},
                           {"residual_multiplier", -1.0, "residual_multiplier: found -1"},
                           {"attention_multiplier", "x", "attention_multiplier"},
                           {"hidden_act", "gelu", "hidden_act: found \"gelu\""}});
}

constexpr ConfigOfFolder kSmolLm3("smollm3-fp32");

TEST(SmolLm3Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"smollm3-fp32", "smollm3-mixed"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(spec.family, Family::kSmolLm3);
    EXPECT_EQ(spec.layers_without_rope, std::vector<std::int64_t>{3});
    EXPECT_TRUE(spec.layer_types.empty());
    EXPECT_EQ(spec.rope.theta, 5e6);
    EXPECT_TRUE(spec.tie_word_embeddings);
  }
}

TEST(SmolLm3Config, AbsentKeysAreTransformersDefaults) {
  const ModelSpec spec =
      kSmolLm3.spec_without({"no_rope_layers", "layer_types", "tie_word_embeddings", "rope_theta",
                             "num_key_value_heads", "max_position_embeddings"});
  EXPECT_EQ(spec.layers_without_rope, std::vector<std::int64_t>{3});
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.rope.theta, 2e6);
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.max_position_embeddings, 32768);
  EXPECT_EQ(kSmolLm3.spec({{"no_rope_layers", nullptr}, {"no_rope_layer_interval", 2}})
                .layers_without_rope,
            (std::vector<std::int64_t>{1, 3}));
}

TEST(SmolLm3Config, WindowsWhereTheyAreOnAreOfLayersWithoutRope) {
  const nlohmann::json on{{"use_sliding_window", true},
                          {"sliding_window", 8},
                          {"layer_types", nullptr},
                          {"no_rope_layers", {0, 1, 1, 0}}};
  const ModelSpec spec = kSmolLm3.spec(on);
  EXPECT_EQ(spec.layer_types, (std::vector{kSliding, kFull, kFull, kSliding}));
  EXPECT_EQ(spec.layers_without_rope, (std::vector<std::int64_t>{0, 3}));
  kSmolLm3.expect_kept({nlohmann::json::object(), on, {{"no_rope_layers", {1, 0, 1, 1}}}});
}

// SmolLM3-3B with the keys as published that are not in the reference folder.
TEST(SmolLm3Config, TheSizesOfThePublishedModelAreRead) {
  nlohmann::json config = kSmolLm3.json();
  for (const char* key : {"no_rope_layers", "layer_types", "tie_word_embeddings"})
    config.erase(key);
  config.update({{"bos_token_id", nullptr},
                 {"eos_token_id", 128012},
                 {"hidden_size", 2048},
                 {"intermediate_size", 11008},
                 {"num_attention_heads", 16},
                 {"num_hidden_layers", 36},
                 {"num_key_value_heads", 4},
                 {"pad_token_id", 128004},
                 {"pretraining_tp", 2},
                 {"vocab_size", 128256}});
  const ModelSpec spec = parse_spec(config.dump()).spec;
  EXPECT_EQ(spec.layers_without_rope.size(), 9U);
  EXPECT_EQ(total_numel(describe(spec).parameters), 3'075'098'624);
}

TEST(SmolLm3Config, WhatDoesNotFitTheLayersIsRefusedByName) {
  kSmolLm3.expect_refused(
      {{"no_rope_layers", {1, 0}, "no_rope_layers: found [1,0]"},
       {"no_rope_layers", {1, 0, 2, 1}},
       {"no_rope_layer_interval", 0},
       {"layer_types", {"sliding_attention"}},
       {"layer_types",
        {"full_attention", "full_attention", "full_attention", "sliding_attention"},
        "use_sliding_window: found false"}});
}

constexpr ConfigOfFolder kPhi3("phi3-fp32");
constexpr ConfigOfFolder kPhi4Mini("phi4-mini-fp32");

TEST(Phi3Config, BothSpellingsGiveTheSameSpec) {
  for (const char* folder : {"phi3-fp32", "phi3-mixed", "phi4-mini-fp32"}) {
    const ModelSpec spec = spec_in_both_spellings(folder);
    EXPECT_EQ(spec.family, Family::kPhi3);
  }
  EXPECT_EQ(kPhi3.spec().sliding_window, 8);
  EXPECT_TRUE(kPhi3.spec().is_sliding(0));
  const ModelSpec mini = kPhi4Mini.spec();
  EXPECT_TRUE(mini.layer_types.empty());
  EXPECT_EQ(mini.turned_dim(), 6);
  EXPECT_EQ(mini.rope.type, nn::RopeType::kLongRope);
  EXPECT_EQ(mini.rope.original_max_position_embeddings, 16);
  EXPECT_EQ(mini.rope.factor, 32.0);
  EXPECT_EQ(mini.rope.long_rope->short_factor, (std::vector<double>{1.0, 1.1, 1.7}));
  EXPECT_EQ(mini.rope.long_rope->long_factor, (std::vector<double>{1.3, 4.0, 20.0}));
}

TEST(Phi3Config, AbsentKeysAreTransformersDefaults) {
  const ModelSpec spec = kPhi3.spec_without({"num_key_value_heads", "sliding_window",
                                             "rms_norm_eps", "max_position_embeddings",
                                             "rope_theta", "original_max_position_embeddings"});
  EXPECT_EQ(spec.num_key_value_heads, 4);
  EXPECT_EQ(spec.sliding_window, 0);
  EXPECT_EQ(spec.rms_norm_eps, 1e-5);
  EXPECT_EQ(spec.max_position_embeddings, 4096);
  EXPECT_EQ(spec.rope.theta, 10000.0);
  EXPECT_EQ(kPhi4Mini.spec_without({"original_max_position_embeddings"})
                .rope.original_max_position_embeddings,
            4096);
}

TEST(Phi3Config, WhatIsWrittenIsReadAsTheSame) {
  kPhi3.expect_kept({nlohmann::json::object(),
                     {{"sliding_window", nullptr}, {"tie_word_embeddings", true}},
                     {{"pad_token_id", nullptr}, {"partial_rotary_factor", 0.5}}});
  const nlohmann::json factors = kPhi4Mini.json().at("rope_scaling");
  nlohmann::json more = factors;
  more.update({{"factor", 3.0}, {"attention_factor", 1.25}});
  kPhi4Mini.expect_kept({nlohmann::json::object(),
                         {{"rope_scaling", more}},
                         {{"max_position_embeddings", 16}},
                         {{"original_max_position_embeddings", 40}}});
  // The older names of the kind.
  for (const char* name : {"su", "yarn"}) {
    nlohmann::json older = factors;
    older["type"] = name;
    EXPECT_EQ(kPhi4Mini.spec({{"rope_scaling", older}}), kPhi4Mini.spec());
  }
}

TEST(Phi3Config, TheMatricesOfAttentionAndMlpAreFused) {
  std::map<std::string, ParameterSpec> rows;
  for (ParameterSpec& row : describe(kPhi4Mini.spec(), {}, {.tp = 2}).parameters) {
    const std::string name = row.name;
    rows.emplace(name, std::move(row));
  }
  const ParameterSpec& qkv = rows.at("model.layers.0.self_attn.qkv_proj.weight");
  EXPECT_EQ(qkv.shape, (std::vector<std::int64_t>{64, 32}));
  EXPECT_EQ(qkv.layout.sections, (std::vector<std::int64_t>{32, 16, 16}));
  EXPECT_EQ(qkv.fused.count, 1) << "queries have more rows than keys";
  const ParameterSpec& both = rows.at("model.layers.0.mlp.gate_up_proj.weight");
  EXPECT_EQ(both.shape, (std::vector<std::int64_t>{80, 32}));
  EXPECT_EQ(both.layout.sections, (std::vector<std::int64_t>{40, 40}));
  EXPECT_EQ(both.fused.count, 2);
  EXPECT_THAT(refusal_of(ErrorKind::kConfig, [] { describe(kPhi4Mini.spec(), {}, {.tp = 4}); }),
              Says("tensor_parallel_degree: found 4", "num_key_value_heads = 2"));
}

// Phi-4-mini-instruct with the keys as published that are not in the reference folder.
TEST(Phi3Config, TheSizesOfThePublishedModelAreRead) {
  nlohmann::json config = kPhi4Mini.json();
  const std::vector<double> factors(48, 1.118320672);  // of 96 of the 128 elements of a head
  config.update({{"bos_token_id", 199999},
                 {"eos_token_id", 199999},
                 {"full_attn_mod", 1},
                 {"hidden_size", 3072},
                 {"intermediate_size", 8192},
                 {"interpolate_factor", 1},
                 {"lm_head_bias", false},
                 {"max_position_embeddings", 131072},
                 {"mlp_bias", false},
                 {"num_attention_heads", 24},
                 {"num_hidden_layers", 32},
                 {"num_key_value_heads", 8},
                 {"original_max_position_embeddings", 4096},
                 {"pad_token_id", 199999},
                 {"sliding_window", 262144},
                 {"vocab_size", 200064}});
  config["rope_scaling"]["short_factor"] = config["rope_scaling"]["long_factor"] = factors;
  const ParsedSpec parsed = parse_spec(config.dump());
  EXPECT_EQ(parsed.spec.turned_dim(), 96);
  EXPECT_EQ(total_numel(describe(parsed.spec).parameters), 3'836'021'760);
  EXPECT_TRUE(parsed.ignored_keys.empty());
}

TEST(Phi3Config, WhatIsNotSupportedIsRefusedByName) {
  kPhi3.expect_refused({{"attention_bias", true, "attention_bias: found true"},
                        {"resid_pdrop", 0.1, "resid_pdrop"},
                        {"full_attn_mod", 2, "full_attn_mod: found 2"},
                        {"partial_rotary_factor", 0.1, "partial_rotary_factor"},
                        {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "longrope"}});
  nlohmann::json factors = kPhi4Mini.json().at("rope_scaling");
  factors["short_factor"] = {1.0, 2.0};
  EXPECT_THAT(kPhi4Mini.refusal({{"rope_scaling", factors}}),
              Says("short_factor: found [1.0,2.0]", "a list of 3 numbers"));
  factors["short_factor"] = {1.0, 2.0, 0.0};
  EXPECT_THAT(kPhi4Mini.refusal({{"rope_scaling", factors}}), Says("short_factor"));
}

constexpr ConfigOfFolder kQwen3("qwen3-fp32");

// The text model in a folder of Qwen3-VL is a Qwen3; against transformers: convert_whole_test.py.
TEST(Qwen3VlConfig, AFolderOfTheWholeModelGivesItsTextModel) {
  nlohmann::json text = kQwen3.json();
  text.erase("architectures");
  text["model_type"] = "qwen3_vl_text";
  text["rope_scaling"] = {
      {"rope_type", "default"}, {"mrope_interleaved", true}, {"mrope_section", {24, 20, 20}}};
  nlohmann::json whole{{"architectures", {"Qwen3VLForConditionalGeneration"}},
                       {"model_type", "qwen3_vl"},
                       {"image_token_id", 5},
                       {"video_token_id", 6},
                       {"vision_start_token_id", 7},
                       {"vision_end_token_id", 8},
                       {"text_config", text},
                       {"vision_config", {{"depth", 27}}}};
  EXPECT_EQ(parse_spec(whole.dump()).spec, kQwen3.spec());
  // Its own values for absent keys.
  text.erase("rope_theta");
  text.erase("max_position_embeddings");
  whole["text_config"] = text;
  EXPECT_EQ(parse_spec(whole.dump()).spec.rope.theta, 5e5);
  EXPECT_EQ(parse_spec(whole.dump()).spec.max_position_embeddings, 128000);
  const auto& name = traits(Family::kQwen3).module_name;
  EXPECT_EQ(name("model.language_model.layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(name("model.visual.pos_embed.weight"), "");
  EXPECT_EQ(name("lm_head.weight"), "lm_head.weight");
  whole["text_config"]["model_type"] = "qwen3_vl_moe_text";
  EXPECT_THAT(config_refusal(whole.dump()), Says("text_config.model_type: found"));
}

// The config.json of SmolLM2-135M as published, with the keys of its training run.
TEST(LlamaConfig, SmolLm2AsPublishedIsRead) {
  const ParsedSpec parsed = parse_spec(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
    "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "vocab_size": 49152})");
  EXPECT_EQ(parsed.spec.family, Family::kLlama);
  EXPECT_EQ(parsed.spec.head_dim, 64);
  EXPECT_EQ(parsed.spec.rope.theta, 1e5);
  EXPECT_EQ(total_numel(describe(parsed.spec).parameters), 134515008);
  EXPECT_TRUE(parsed.warnings.empty());
}

}  // namespace
}  // namespace tessera::models::dense_config_test
