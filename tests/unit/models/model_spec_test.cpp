#include "models/model_spec.h"

#include <cmath>

#include "support/test.h"

namespace tessera::models::model_spec_test {
namespace {

/// A small Qwen3 in the hub's spelling; `extra` is put in front of the other keys.
std::string qwen3(const std::string& extra = "") {
  return "{" + extra + R"(
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
    "bos_token_id": 0, "eos_token_id": [1, 2], "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 80, "max_window_layers": 4, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "use_cache": true,
    "transformers_version": "5.23.0", "vocab_size": 128})";
}

/// A small Llama without the keys of rope; `extra` is put in front of the other keys.
std::string llama(const std::string& extra = "") {
  return "{" + extra + R"(
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 80,
    "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128})";
}

/// The message of the error, checked to be of this kind; "" if there was none.
std::string refusal(const std::string& text, ErrorKind kind = ErrorKind::kConfig,
                    const SpecOptions& options = {}) {
  return refusal_of(kind, [&] { parse_spec(text, options); });
}

TEST(ModelSpec, HubSpellingOfQwen3IsRead) {
  const ModelSpec spec =
      parse_spec(qwen3(R"("head_dim": 16, "rope_theta": 1e6, "torch_dtype": "bfloat16",)")).spec;
  EXPECT_EQ(spec.family, Family::kQwen3);
  EXPECT_EQ(spec.hidden_size, 32);
  EXPECT_EQ(spec.head_dim, 16);
  EXPECT_EQ(spec.num_key_value_heads, 2);
  EXPECT_EQ(spec.rope, (nn::RopeOptions{.theta = 1e6}));
  EXPECT_EQ(spec.dtype, DType::kBFloat16);
  EXPECT_EQ(spec.eos_token_ids, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(spec.bos_token_id, 0);
  EXPECT_FALSE(spec.pad_token_id.has_value());
  EXPECT_FALSE(spec.tie_word_embeddings);
}

TEST(ModelSpec, BothSpellingsGiveTheSameSpec) {
  const std::string written = llama(R"("dtype": "float32", "rope_parameters": {"factor": 32.0,
      "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
      "rope_theta": 500000.0, "rope_type": "llama3"},)");
  const std::string hub = llama(R"("torch_dtype": "float32", "rope_theta": 500000.0,
      "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "type": "llama3"},)");
  EXPECT_EQ(parse_spec(written).spec, parse_spec(hub).spec);
  EXPECT_EQ(parse_spec(hub).spec.rope.type, nn::RopeType::kLlama3);
  EXPECT_EQ(parse_spec(hub).spec.rope.factor, 32.0);
}

TEST(ModelSpec, YarnIsReadInBothSpellings) {
  const std::string numbers = R"("beta_fast": 16, "beta_slow": 2, "factor": 40, "mscale": 0.707,
      "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096, "truncate": false)";
  const std::string written =
      llama(R"("rope_parameters": {)" + numbers + R"(, "rope_theta": 1e5, "rope_type": "yarn"},)");
  const std::string hub =
      llama(R"("rope_theta": 1e5, "rope_scaling": {)" + numbers + R"(, "type": "yarn"},)");
  const nn::RopeOptions rope = parse_spec(hub).spec.rope;
  EXPECT_EQ(rope, (nn::RopeOptions{.theta = 1e5,
                                   .type = nn::RopeType::kYarn,
                                   .factor = 40,
                                   .original_max_position_embeddings = 4096,
                                   .yarn = {.beta_fast = 16,
                                            .beta_slow = 2,
                                            .mscale = 0.707,
                                            .mscale_all_dim = 0.5,
                                            .truncate = false}}));
  EXPECT_EQ(parse_spec(written).spec.rope, rope);
  EXPECT_EQ(parse_spec(config_json(parse_spec(hub).spec)).spec.rope, rope);
  const nn::RopeOptions plain = parse_spec(llama(R"("rope_scaling": {"factor": 4,
      "original_max_position_embeddings": 64, "attention_factor": 1.5, "type": "yarn"},)"))
                                    .spec.rope;
  EXPECT_EQ(plain.yarn,
            (nn::YarnOptions{.beta_fast = 32, .beta_slow = 1, .attention_factor = 1.5}));
}

// The factors as transformers computes them for the same keys.
TEST(ModelSpec, YarnGrowsTablesAndSoftmaxAsItsKeysSay) {
  nn::RopeOptions rope{.type = nn::RopeType::kYarn, .factor = 32};
  EXPECT_DOUBLE_EQ(table_factor(rope), 1.3465735902799727);
  EXPECT_EQ(softmax_factor(rope), 1.0);
  rope.yarn.attention_factor = 2.0;
  EXPECT_EQ(table_factor(rope), 2.0);
  rope = {
      .type = nn::RopeType::kYarn, .factor = 40, .yarn = {.mscale = 1.0, .mscale_all_dim = 0.5}};
  EXPECT_DOUBLE_EQ(table_factor(rope), 1.1557219901962608);
  const double growth = 0.05 * std::log(40.0) + 1.0;
  EXPECT_DOUBLE_EQ(softmax_factor(rope), growth * growth);
  rope.yarn.mscale = 0.5;
  EXPECT_EQ(table_factor(rope), 1.0);
  rope.type = nn::RopeType::kDefault;
  EXPECT_EQ(softmax_factor(rope), 1.0);
}

TEST(ModelSpec, YarnWithImpossibleNumbersIsRefused) {
  const std::string whole = R"("factor": 4, "original_max_position_embeddings": 64,)";
  const std::pair<std::string, const char*> cases[] = {
      {R"("factor": 4, "original_max_position_embeddings": 0,)",
       "original_max_position_embeddings: found 0"},
      {R"("factor": 0.5, "original_max_position_embeddings": 64,)", "factor: found 0.5"},
      {whole + R"("beta_fast": 1, "beta_slow": 2,)", "beta_fast: found 1"},
      {whole + R"("attention_factor": 0,)", "attention_factor: found 0"},
      {whole + R"("mscale": -1,)", "mscale: found -1"},
      {whole + R"("truncate": 1,)", "truncate: found 1"},
      {whole + R"("rope_theta": 1,)", "rope_theta: found 1"},
      {whole + R"("long_mscale": 1,)", "long_mscale"},
  };
  for (const auto& [keys, expected] : cases) {
    EXPECT_THAT(refusal(llama(R"("rope_parameters": {)" + keys + R"("rope_type": "yarn"},)")),
                Says(expected));
  }
}

TEST(ModelSpec, AbsentKeysTakeTheFamilysDefaults) {
  EXPECT_EQ(parse_spec(qwen3()).spec.head_dim, 128);
  EXPECT_EQ(parse_spec(llama()).spec.head_dim, 8);
  EXPECT_EQ(parse_spec(llama()).spec.num_key_value_heads, 4);
  EXPECT_EQ(parse_spec(llama()).spec.rope.theta, 10000.0);
  EXPECT_EQ(parse_spec(llama(R"("num_key_value_heads": null, "rope_scaling": null,)")).spec,
            parse_spec(llama()).spec);
}

TEST(ModelSpec, PaddingIndexCountsFromTheEndWhenNegative) {
  EXPECT_EQ(parse_spec(llama(R"("pad_token_id": -1,)")).spec.pad_token_id, 127);
  EXPECT_THAT(refusal(llama(R"("pad_token_id": 128,)")), Says("pad_token_id: found 128"));
}

TEST(ModelSpec, WrittenConfigIsReadBackEqual) {
  for (const std::string& text :
       {qwen3(R"("head_dim": 16, "rope_theta": 1e6, "tessera_tokenizer": "bytes",)"),
        llama(R"("tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true,
                 "pad_token_id": 3, "torch_dtype": "float16", "rope_theta": 5e5,
                 "rope_scaling": {"factor": 8, "high_freq_factor": 4, "low_freq_factor": 1,
                 "original_max_position_embeddings": 8192, "rope_type": "llama3"},)")}) {
    const ModelSpec spec = parse_spec(text).spec;
    EXPECT_EQ(parse_spec(config_json(spec)).spec, spec) << config_json(spec);
  }
}

TEST(ModelSpec, UnsupportedMathsIsRefusedWithKeyAndValue) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("use_sliding_window": true,)", "use_sliding_window: found true"},
      {R"("layer_types": ["full_attention", "sliding_attention"],)", "\"sliding_attention\""},
      {R"("layer_types": ["full_attention"],)", "layer_types: found [\"full_attention\"]"},
      {R"("rope_scaling": {"rope_type": "longrope", "factor": 4.0},)",
       "rope_type: found \"longrope\""},
      {R"("rope_scaling": {"type": "dynamic", "factor": 2.0},)", "type: found \"dynamic\""},
      {R"("rope_parameters": {"rope_type": "dynamic"},)", "rope_type: found \"dynamic\""},
      {R"("attention_dropout": 0.1,)", "attention_dropout: found 0.1"},
      {R"("pretraining_tp": 2,)", "pretraining_tp: found 2"},
      {R"("partial_rotary_factor": 0.5,)", "partial_rotary_factor: found 0.5"},
      {R"("rope_parameters": {"partial_rotary_factor": 0.5},)",
       "rope_parameters.partial_rotary_factor: found 0.5"},
      {R"("quantization_config": {"quant_method": "fp8"},)", "quantization_config: found {"},
      {R"("mlp_bias": true,)", "mlp_bias: found true"},
  };
  for (const auto& [extra, expected] : cases) {
    EXPECT_THAT(refusal(qwen3(extra)), Says(expected)) << extra;
  }
  std::string gelu = llama();
  gelu.insert(1, R"("hidden_act": "gelu",)");
  EXPECT_THAT(refusal(gelu), Says("hidden_act: found \"gelu\""));
}

// qwen3() already has some of these keys; a second one must not win or lose silently.
TEST(ModelSpec, DuplicateKeysAreRefused) {
  EXPECT_THAT(refusal(qwen3(R"("hidden_size": 64,)"), ErrorKind::kFormat), Says("twice"));
}

TEST(ModelSpec, DropoutIsAllowedWithoutTraining) {
  const std::string text = llama(R"("attention_dropout": 0.1,)");
  EXPECT_NE(refusal(text), "");
  const SpecOptions reading{.purpose = Purpose::kInference};
  EXPECT_EQ(refusal(text, ErrorKind::kConfig, reading), "");
  // Who trains with the folder that is written of it must not train without.
  const ModelSpec spec = parse_spec(text, reading).spec;
  EXPECT_EQ(spec.attention_dropout, 0.1);
  EXPECT_EQ(parse_spec(config_json(spec), reading).spec, spec);
  EXPECT_THAT(refusal(config_json(spec)), Says("attention_dropout: found 0.1"));
  EXPECT_THAT(refusal(llama(R"("attention_dropout": 2,)"), ErrorKind::kConfig, reading),
              Says("attention_dropout: found 2"));
}

TEST(ModelSpec, ImpossibleNumbersAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("head_dim": 15,)", "head_dim: found 15"},
      {R"("head_dim": 0,)", "head_dim: found 0"},
      {R"("num_key_value_heads": 3,)", "num_key_value_heads: found 3"},
      {R"("rms_norm_eps": 0,)", "rms_norm_eps: found 0"},
      {R"("rms_norm_eps": "small",)", "rms_norm_eps: found \"small\""},
      {R"("rope_theta": -1,)", "rope_theta: found -1"},
      {R"("initializer_range": -0.1,)", "initializer_range: found -0.1"},
      {R"("max_position_embeddings": 18446744073709551615,)", "18446744073709551615"},
      {R"("max_position_embeddings": 1.5,)", "max_position_embeddings: found 1.5"},
      {R"("tie_word_embeddings": 1,)", "tie_word_embeddings: found 1"},
      {R"("dtype": "int64",)", "dtype: found \"int64\""},
      {R"("dtype": "float32", "torch_dtype": "bfloat16",)", "torch_dtype: found \"bfloat16\""},
      {R"("rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0},)", "rope_theta: found 5.0"},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": 8},)",
       "low_freq_factor: found nothing"},
      {R"("rope_scaling": [1],)", "rope_scaling: found [1]"},
      {R"("eos_token_id": ["a"],)", "eos_token_id: found \"a\""},
      {R"("tessera_tokenizer": "words",)", "tessera_tokenizer: found \"words\""},
  };
  for (const auto& [extra, expected] : cases) {
    EXPECT_THAT(refusal(llama(extra)), Says(expected)) << extra;
  }
  EXPECT_THAT(refusal(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 2147483648,
      "intermediate_size": 2147483648, "num_attention_heads": 1, "num_hidden_layers": 65536,
      "vocab_size": 2147483648})"),
              Says("parameters, expected at most"));
  EXPECT_THAT(refusal(R"({"model_type": "llama"})"), Says("found nothing"));
}

TEST(ModelSpec, UnknownArchitectureListsTheKnownOnes) {
  for (const char* text : {R"({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})",
                           R"({"model_type": "mamba"})", "{}"}) {
    EXPECT_THAT(refusal(text), Says("Qwen3ForCausalLM", "LlamaForCausalLM"));
  }
  EXPECT_THAT(refusal(R"({"architectures": ["LlamaForCausalLM"], "model_type": "qwen3"})"),
              Says("model_type: found 'qwen3' with architectures 'LlamaForCausalLM'"));
}

TEST(ModelSpec, UnknownKeysAreRefusedOrWarnedOf) {
  const std::string text = llama(R"("logit_scale": 2.0, "rope_parameters": {"long_mscale": 32},)");
  EXPECT_THAT(refusal(text), Says("allow_unknown_config_keys"));
  const ParsedSpec parsed = parse_spec(text, {.unknown_keys = UnknownKeys::kWarn});
  ASSERT_EQ(parsed.warnings.size(), 2u);
  EXPECT_THAT(parsed.warnings[0], Says("rope_parameters.\"long_mscale\" = 32"));
  EXPECT_THAT(parsed.warnings[1], Says("\"logit_scale\" = 2.0"));
}

TEST(ModelSpec, MalformedTextIsAFormatError) {
  for (const std::string& text :
       {std::string(), std::string("[]"), std::string("{"), std::string("{\"a\": 1e999}"),
        std::string("\xff\xfe{}"), std::string(100000, '['), std::string(5 << 20, ' ') + "{}"}) {
    EXPECT_NE(refusal(text, ErrorKind::kFormat), "") << text.substr(0, 20);
  }
}

}  // namespace
}  // namespace tessera::models::model_spec_test
