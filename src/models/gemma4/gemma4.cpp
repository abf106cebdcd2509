// Gemma 4 with images: a frozen vision tower, a projector, and a text model whose layers slide or
// see everything, with a mixture of experts beside each dense MLP.
//
// Its config.json has three nested configs, of which every key is used, harmless or refused. Both
// spellings of the layers' differences are read (global_head_dim and its like, or per_layer_config).
// Source: transformers 5.23, models/gemma4. Next: gemma4_spec.h, gemma4_layers.h.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "models/config_reader.h"
#include "models/family.h"
#include "models/gemma4/gemma4_layers.h"
#include "models/keys/known_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr IntRange kToken{0, std::int64_t{1} << 31};
constexpr NumberRange kEps{1e-30, 1.0};
// Two buffers of this size are made with the model, before anybody has looked whether its folder
// has them.
constexpr IntRange kVisionWidth{1, std::int64_t{1} << 20};

/// An explicit null is not the default: transformers would keep it.
std::int64_t or_default(ConfigReader& keys, std::string_view key, IntRange range,
                        std::int64_t absent) {
  if (!keys.contains(key)) return absent;
  return required(keys, key, range);
}

/// Null means that the model has no such token, as of a modality that it was published without.
std::optional<std::int64_t> token_or_null(ConfigReader& keys, std::string_view key,
                                          std::optional<std::int64_t> absent) {
  return keys.contains(key) ? keys.integer(key, kToken) : absent;
}

/// One nested config; null where the key is absent or null.
const nlohmann::json* nested(ConfigReader& keys, std::string_view key) {
  const nlohmann::json* object = keys.take(key);
  if (object != nullptr && !object->is_object()) keys.refuse(key, "an object");
  return object;
}

/// What a text_config may say that is not computed here.
void expect_supported_text(ConfigReader& keys) {
  keys.expect("model_type", "gemma4_text", "the text model of this family");
  keys.expect("hidden_activation", "gelu_pytorch_tanh", "the activation of the MLP");
  keys.expect("attention_bias", false, "biases are not supported in this family");
  keys.expect("num_kv_shared_layers", 0, "layers that share keys and values are not supported");
  keys.ignore({"use_double_wide_mlp"});         // only of layers that share keys and values
  keys.ignore({"vocab_size_per_layer_input"});  // only of per-layer inputs
  if (!keys.contains("hidden_size_per_layer_input")) {
    keys.refuse("hidden_size_per_layer_input",
                "0 (absent means 256: per-layer inputs are not supported)");
  }
  keys.expect("hidden_size_per_layer_input", 0, "per-layer inputs are not supported");
}

std::optional<MoeSpec> read_experts(ConfigReader& keys) {
  if (!keys.boolean("enable_moe_block").value_or(false)) {
    keys.ignore({"num_experts", "top_k_experts", "moe_intermediate_size"});
    return std::nullopt;
  }
  MoeSpec moe;
  moe.num_experts = required(keys, "num_experts", {1, 65536});
  moe.experts_per_token = required(keys, "top_k_experts", {1, moe.num_experts});
  moe.moe_intermediate_size = required(keys, "moe_intermediate_size", kSize);
  moe.router_dtype = RouterDtype::kFloat32;
  moe.norm_topk_prob = true;
  moe.activation = ExpertActivation::kGeglu;
  moe.layout = ExpertLayout::kOutInAsOne;
  return moe;
}

ImageAttention read_image_attention(ConfigReader& keys) {
  const auto word = keys.word("use_bidirectional_attention");
  if (!word) return ImageAttention::kCausal;
  if (*word != "vision") keys.refuse("use_bidirectional_attention", "null or \"vision\"");
  return ImageAttention::kBothWays;
}

void check_text_size(const ModelSpec& spec) {
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const Gemma4Spec& gemma = *spec.gemma4;
  double total = d(spec.hidden_size) * d(spec.vocab_size);
  for (const Gemma4Layer& layer : gemma.layers) {
    total += 2 * d(spec.hidden_size) * d(layer.head_dim) *
             (d(spec.num_attention_heads) + d(layer.num_key_value_heads));
    total += 3 * d(spec.hidden_size) * d(spec.intermediate_size);
    if (spec.moe) {
      total += d(spec.moe->num_experts) * d(spec.hidden_size) *
               (3 * d(spec.moe->moe_intermediate_size) + 1);
    }
  }
  check_total(total);
}

void read_text(ConfigReader& keys, Purpose purpose, ModelSpec& spec,
               std::vector<std::string>& unknown) {
  Gemma4Spec& gemma = *spec.gemma4;
  expect_supported_text(keys);
  spec.attention_dropout = read_attention_dropout(keys, purpose);
  spec.vocab_size = or_default(keys, "vocab_size", kSize, 262144);
  spec.hidden_size = or_default(keys, "hidden_size", kSize, 2304);
  spec.intermediate_size = or_default(keys, "intermediate_size", kSize, 9216);
  spec.num_hidden_layers = or_default(keys, "num_hidden_layers", kLayers, 30);
  spec.num_attention_heads = or_default(keys, "num_attention_heads", kSize, 8);
  spec.num_key_value_heads = or_default(keys, "num_key_value_heads", kSize, 4);
  spec.head_dim = or_default(keys, "head_dim", kSize, 256);
  spec.max_position_embeddings = or_default(keys, "max_position_embeddings", kSize, 131072);
  spec.rms_norm_eps = keys.number("rms_norm_eps", kEps).value_or(1e-6);
  spec.initializer_range = keys.number("initializer_range", {0.0, 1e3}).value_or(0.02);
  gemma.sliding_window = or_default(keys, "sliding_window", kSize, 512);
  gemma.image_attention = read_image_attention(keys);
  gemma.final_logit_softcapping = keys.number("final_logit_softcapping", {1e-6, 1e9});
  spec.moe = read_experts(keys);
  read_gemma4_layers(keys, spec);
  read_gemma4_rope(keys, spec, unknown);
  const bool null_pad = keys.is_null("pad_token_id");
  if (null_pad) keys.refuse("pad_token_id", "a token, as images stand on its embedding");
  read_tokens(keys, spec);
  spec.pad_token_id = spec.pad_token_id.value_or(0);
  if (!keys.contains("bos_token_id")) spec.bos_token_id = 2;
  if (!keys.contains("eos_token_id")) spec.eos_token_ids = {1};
  check_text_size(spec);
}

void read_vision_rope(ConfigReader& keys, Gemma4Vision& vision, std::vector<std::string>& unknown) {
  const nlohmann::json* record = nested(keys, "rope_parameters");
  if (record == nullptr) return;
  ConfigReader rope(*record, "vision_config.rope_parameters.");
  const auto type = rope.word("rope_type");
  // "default" is the older spelling; the maths is the same.
  if (type && *type != "axial" && *type != "default") {
    rope.refuse("rope_type", "\"axial\" or \"default\"");
  }
  vision.rope_theta = rope.number("rope_theta", kTheta).value_or(vision.rope_theta);
  for (std::string& line : rope.unknown()) unknown.push_back(std::move(line));
}

void check_vision(ConfigReader& keys, const Gemma4Vision& vision) {
  if (vision.num_attention_heads % vision.num_key_value_heads != 0) {
    keys.refuse("num_key_value_heads", concat("a divisor of ", vision.num_attention_heads));
  }
  if (vision.head_dim % 4 != 0) {
    keys.refuse("head_dim", "a multiple of 4, as rope turns pairs in two directions");
  }
  const auto d = [](std::int64_t n) { return static_cast<double>(n); };
  const double layer = 2 * d(vision.hidden_size) * d(vision.head_dim) *
                           (d(vision.num_attention_heads) + d(vision.num_key_value_heads)) +
                       3 * d(vision.hidden_size) * d(vision.intermediate_size);
  check_total(d(vision.num_hidden_layers) * layer +
              d(vision.hidden_size) * (2 * d(vision.position_embedding_size) +
                                       3 * d(vision.patch_size) * d(vision.patch_size)));
}

Gemma4Vision read_vision(ConfigReader& keys, Purpose purpose, std::vector<std::string>& unknown) {
  Gemma4Vision vision;
  keys.expect("model_type", "gemma4_vision", "the vision tower of this family");
  keys.expect("hidden_activation", "gelu_pytorch_tanh", "the activation of the MLP");
  keys.expect("use_clipped_linears", false, "clipped projections are not supported");
  vision.attention_dropout = read_attention_dropout(keys, purpose);
  // transformers never reads the first two; weights are drawn by the text's range.
  keys.ignore({"attention_bias", "max_position_embeddings", "initializer_range"});
  const auto size = [&](std::string_view key, std::int64_t absent, IntRange range = kSize) {
    return or_default(keys, key, range, absent);
  };
  vision.hidden_size = size("hidden_size", vision.hidden_size, kVisionWidth);
  vision.intermediate_size = size("intermediate_size", vision.intermediate_size);
  vision.num_hidden_layers = size("num_hidden_layers", vision.num_hidden_layers, kLayers);
  vision.num_attention_heads = size("num_attention_heads", vision.num_attention_heads);
  vision.num_key_value_heads = size("num_key_value_heads", vision.num_key_value_heads);
  vision.head_dim = size("head_dim", vision.head_dim);
  keys.expect("global_head_dim", vision.head_dim, "all layers of the tower have heads of head_dim");
  keys.ignore({"default_output_length"});  // how the processor resizes images
  vision.patch_size = size("patch_size", vision.patch_size, {1, 4096});
  vision.pooling_kernel_size = size("pooling_kernel_size", vision.pooling_kernel_size, {1, 4096});
  vision.position_embedding_size = size("position_embedding_size", vision.position_embedding_size);
  vision.rms_norm_eps = keys.number("rms_norm_eps", kEps).value_or(vision.rms_norm_eps);
  vision.standardize = keys.boolean("standardize").value_or(vision.standardize);
  read_vision_rope(keys, vision, unknown);
  check_vision(keys, vision);
  return vision;
}

/// The dtype of a nested config must be that of all others.
void join_dtype(ConfigReader& keys, std::optional<DType>& dtype) {
  const auto found = read_dtype(keys);
  if (found && dtype && *found != *dtype) {
    keys.refuse(keys.contains("dtype") ? "dtype" : "torch_dtype",
                concat("the ", to_string(*dtype), " of the other configs"));
  }
  if (found) dtype = found;
}

nlohmann::ordered_json text_json(const ModelSpec& spec) {
  const Gemma4Spec& gemma = *spec.gemma4;
  nlohmann::ordered_json json;
  json["attention_bias"] = false;
  json["attention_dropout"] = spec.attention_dropout;
  write_gemma4_layers(spec, json);
  json["bos_token_id"] = or_null(spec.bos_token_id);
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["enable_moe_block"] = spec.moe.has_value();
  json["eos_token_id"] = eos_token(spec.eos_token_ids);
  json["final_logit_softcapping"] = or_null(gemma.final_logit_softcapping);
  json["head_dim"] = spec.head_dim;
  json["hidden_activation"] = "gelu_pytorch_tanh";
  json["hidden_size"] = spec.hidden_size;
  json["hidden_size_per_layer_input"] = 0;
  json["initializer_range"] = spec.initializer_range;
  json["intermediate_size"] = spec.intermediate_size;
  json["max_position_embeddings"] = spec.max_position_embeddings;
  json["model_type"] = "gemma4_text";
  json["moe_intermediate_size"] = nullptr;
  json["num_attention_heads"] = spec.num_attention_heads;
  json["num_experts"] = nullptr;
  json["num_hidden_layers"] = spec.num_hidden_layers;
  json["num_key_value_heads"] = spec.num_key_value_heads;
  json["num_kv_shared_layers"] = 0;
  json["pad_token_id"] = or_null(spec.pad_token_id);
  json["rms_norm_eps"] = spec.rms_norm_eps;
  write_gemma4_rope(spec, json);
  json["sliding_window"] = gemma.sliding_window;
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  json["top_k_experts"] = nullptr;
  json["use_bidirectional_attention"] = nullptr;
  if (gemma.image_attention == ImageAttention::kBothWays) {
    json["use_bidirectional_attention"] = "vision";
  }
  json["use_cache"] = true;
  json["use_double_wide_mlp"] = false;
  json["vocab_size"] = spec.vocab_size;
  json["vocab_size_per_layer_input"] = spec.vocab_size;
  if (spec.moe) {
    json["moe_intermediate_size"] = spec.moe->moe_intermediate_size;
    json["num_experts"] = spec.moe->num_experts;
    json["top_k_experts"] = spec.moe->experts_per_token;
  }
  return json;
}

nlohmann::ordered_json vision_json(const ModelSpec& spec) {
  if (!spec.gemma4->vision) return nullptr;
  const Gemma4Vision& vision = *spec.gemma4->vision;
  nlohmann::ordered_json json;
  json["attention_bias"] = false;
  json["attention_dropout"] = vision.attention_dropout;
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["head_dim"] = vision.head_dim;
  json["hidden_activation"] = "gelu_pytorch_tanh";
  json["hidden_size"] = vision.hidden_size;
  json["initializer_range"] = spec.initializer_range;
  json["intermediate_size"] = vision.intermediate_size;
  json["model_type"] = "gemma4_vision";
  json["num_attention_heads"] = vision.num_attention_heads;
  json["num_hidden_layers"] = vision.num_hidden_layers;
  json["num_key_value_heads"] = vision.num_key_value_heads;
  json["patch_size"] = vision.patch_size;
  json["pooling_kernel_size"] = vision.pooling_kernel_size;
  json["position_embedding_size"] = vision.position_embedding_size;
  json["rms_norm_eps"] = vision.rms_norm_eps;
  json["rope_parameters"] = {{"rope_theta", vision.rope_theta}, {"rope_type", "axial"}};
  json["standardize"] = vision.standardize;
  json["use_clipped_linears"] = false;
  return json;
}

/// `left` collects the nested keys that were not used.
ModelSpec read_gemma4(ConfigReader& keys, Purpose purpose, LeftKeys& left) {
  ModelSpec spec;
  spec.family = Family::kGemma4;
  Gemma4Spec& gemma = spec.gemma4.emplace();
  keys.expect("audio_config", nullptr, "audio is not supported");
  // The text_config's count; the last two are the tokenizer's and the processor's.
  keys.ignore({"initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "eoa_token_id",
               "vision_soft_tokens_per_image"});
  gemma.image_token_id = or_default(keys, "image_token_id", kToken, gemma.image_token_id);
  gemma.video_token_id = token_or_null(keys, "video_token_id", gemma.video_token_id);
  gemma.audio_token_id = token_or_null(keys, "audio_token_id", gemma.audio_token_id);
  gemma.boi_token_id = token_or_null(keys, "boi_token_id", gemma.boi_token_id);
  gemma.eoi_token_id = token_or_null(keys, "eoi_token_id", gemma.eoi_token_id);
  gemma.boa_token_id = token_or_null(keys, "boa_token_id", gemma.boa_token_id);
  gemma.eoa_token_index = token_or_null(keys, "eoa_token_index", gemma.eoa_token_index);
  spec.tie_word_embeddings = keys.boolean("tie_word_embeddings").value_or(true);
  join_dtype(keys, spec.dtype);
  spec.tessera_tokenizer = read_tokenizer(keys);
  const nlohmann::json* text = nested(keys, "text_config");
  if (text == nullptr) keys.refuse("text_config", "an object");
  ConfigReader text_keys(*text, "text_config.");
  join_dtype(text_keys, spec.dtype);
  text_keys.expect("tie_word_embeddings", spec.tie_word_embeddings,
                   "as the top level of the file says");
  read_text(text_keys, purpose, spec, left.unknown);
  settle_left_keys(text_keys, nullptr, left);
  if (const nlohmann::json* vision = nested(keys, "vision_config")) {
    ConfigReader vision_keys(*vision, "vision_config.");
    join_dtype(vision_keys, spec.dtype);
    gemma.vision = read_vision(vision_keys, purpose, left.unknown);
    settle_left_keys(vision_keys, nullptr, left);
  }
  return spec;
}

nlohmann::ordered_json gemma4_json(const ModelSpec& spec) {
  const Gemma4Spec& gemma = *spec.gemma4;
  nlohmann::ordered_json json;
  json["architectures"] = {"Gemma4ForConditionalGeneration"};
  json["audio_config"] = nullptr;
  json["audio_token_id"] = or_null(gemma.audio_token_id);
  json["boa_token_id"] = or_null(gemma.boa_token_id);
  json["boi_token_id"] = or_null(gemma.boi_token_id);
  if (spec.dtype) json["dtype"] = to_string(*spec.dtype);
  json["eoa_token_index"] = or_null(gemma.eoa_token_index);
  json["eoi_token_id"] = or_null(gemma.eoi_token_id);
  json["image_token_id"] = gemma.image_token_id;
  json["initializer_range"] = spec.initializer_range;
  json["model_type"] = "gemma4";
  json["text_config"] = text_json(spec);
  json["tie_word_embeddings"] = spec.tie_word_embeddings;
  json["video_token_id"] = or_null(gemma.video_token_id);
  json["vision_config"] = vision_json(spec);
  if (!spec.tessera_tokenizer.empty()) json["tessera_tokenizer"] = spec.tessera_tokenizer;
  return json;
}

LayerAttention attention_of_layer(const ModelSpec& spec, std::int64_t number) {
  const Gemma4Layer& layer = spec.gemma4->layers.at(static_cast<std::size_t>(number));
  LayerAttention of{2 * layer.head_dim};
  if (layer.type == LayerType::kSliding) of.window = spec.gemma4->sliding_window;
  return of;
}

std::vector<std::int64_t> heads_of_layers(const ModelSpec& spec) {
  std::vector<std::int64_t> heads;
  for (const Gemma4Layer& layer : spec.gemma4->layers) heads.push_back(layer.num_key_value_heads);
  return heads;
}

std::optional<ImageTokens> tokens_of_images(const ModelSpec& spec) {
  if (!spec.gemma4->vision) return std::nullopt;
  return ImageTokens{spec.gemma4->image_token_id, spec.gemma4->vision->patches()};
}

}  // namespace

const FamilyTraits& gemma4_traits() {
  static const FamilyTraits traits{
      .family = Family::kGemma4,
      .model_type = "gemma4",
      .architecture = "Gemma4ForConditionalGeneration",
      // read_all knows the defaults.
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 131072,
      .has_mlp_bias = false,
      .pins = {.strict = {}, .under_float16 = {}, .routers = {"router.proj", "router.scale"}},
      .frozen = {"model.vision_tower"},
      .module_name = [](std::string_view name) { return std::string(name); },
      .attention_of = attention_of_layer,
      .key_value_heads = heads_of_layers,
      .image_tokens = tokens_of_images,
      .keeps = keeps_of_gemma4,
      .read_all = read_gemma4,
      .write_all = gemma4_json,
  };
  return traits;
}

}  // namespace tessera::models
