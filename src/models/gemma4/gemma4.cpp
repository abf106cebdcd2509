// Gemma 4 with images: a frozen vision tower, a projector, and a text model whose layers slide or
// see everything, with a mixture of experts in parallel to each dense MLP.
//
// Its config.json has three nested configs, of which every key is used, harmless or refused. Both
// spellings of the layers' differences are read (global_head_dim and such keys, per_layer_config).
// Source: transformers 5.23, models/gemma4. Next: gemma4_spec.h, gemma4_layers.h.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "models/family.h"
#include "models/gemma3/gemma_keys.h"
#include "models/gemma4/gemma4_layers.h"
#include "models/keys/config_reader.h"
#include "models/keys/known_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr IntRange kToken{0, std::int64_t{1} << 31};
// Two buffers of this size are made with the model, before anybody has looked whether its folder
// has them.
constexpr IntRange kVisionWidth{1, std::int64_t{1} << 20};

/// One nested config; null where the key is absent or null.
const nlohmann::json* nested(ConfigReader& keys, std::string_view key) {
  const nlohmann::json* object = keys.take(key);
  if (object != nullptr && !object->is_object()) keys.refuse(key, "an object");
  return object;
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

void read_image_attention(ConfigReader& keys, ModelSpec& spec) {
  const auto word = keys.word("use_bidirectional_attention");
  if (!word) return;
  if (*word != "vision") keys.refuse("use_bidirectional_attention", "null or \"vision\"");
  spec.gemma4->image_attention = ImageAttention::kBothWays;
}

void read_per_layer_inputs(ConfigReader& keys, ModelSpec& /*spec*/) {
  if (!keys.contains("hidden_size_per_layer_input")) {
    keys.refuse("hidden_size_per_layer_input",
                "0 (absent means 256: per-layer inputs are not supported)");
  }
  keys.expect("hidden_size_per_layer_input", 0, "per-layer inputs are not supported");
}

KeyRows rows_of_text() {
  return {
      always("attention_bias", false, "biases are not supported in this family"),
      written("attention_dropout", &ModelSpec::attention_dropout),
      {"attention_k_eq_v", {}, write_gemma4_layers},
      written("bos_token_id", &ModelSpec::bos_token_id),
      dtype_row("dtype"),
      written({"enable_moe_block"}, [](const ModelSpec& spec) { return spec.moe.has_value(); }),
      eos_row(),
      row("final_logit_softcapping", &Gemma4Spec::final_logit_softcapping, {1e-6, 1e9}),
      size("head_dim", &ModelSpec::head_dim),
      gelu_row(),
      size("hidden_size", &ModelSpec::hidden_size),
      written({"hidden_size_per_layer_input", read_per_layer_inputs},
              [](const ModelSpec&) { return 0; }),
      row("initializer_range", &ModelSpec::initializer_range, {0.0, 1e3}),
      size("intermediate_size", &ModelSpec::intermediate_size),
      size("max_position_embeddings", &ModelSpec::max_position_embeddings),
      always("model_type", "gemma4_text", "the text model of this family"),
      written("moe_intermediate_size", &MoeSpec::moe_intermediate_size),
      size("num_attention_heads", &ModelSpec::num_attention_heads),
      written("num_experts", &MoeSpec::num_experts),
      size("num_hidden_layers", &ModelSpec::num_hidden_layers, kLayers),
      size("num_key_value_heads", &ModelSpec::num_key_value_heads),
      always("num_kv_shared_layers", 0, "layers that share keys and values are not supported"),
      written("pad_token_id", &ModelSpec::pad_token_id),
      row("rms_norm_eps", &ModelSpec::rms_norm_eps, kEps),
      {"rope_parameters", {}, write_gemma4_rope},
      size("sliding_window", &Gemma4Spec::sliding_window),
      written("tie_word_embeddings", &ModelSpec::tie_word_embeddings),
      written("top_k_experts", &MoeSpec::experts_per_token),
      written({"use_bidirectional_attention", read_image_attention},
              [](const ModelSpec& spec) {
                const bool sees = spec.gemma4->image_attention == ImageAttention::kBothWays;
                return sees ? Json("vision") : Json();
              }),
      said("use_cache", true),
      said("use_double_wide_mlp", false),  // only of layers that share keys and values
      size("vocab_size", &ModelSpec::vocab_size),
      // Only of per-layer inputs.
      written({"vocab_size_per_layer_input", ignored({"vocab_size_per_layer_input"}).read},
              [](const ModelSpec& spec) { return spec.vocab_size; }),
  };
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
  read_rows(rows_of_text(), keys, spec);
  spec.attention_dropout = read_attention_dropout(keys, purpose);
  spec.moe = read_experts(keys);
  read_gemma4_layers(keys, spec);
  read_gemma4_rope(keys, spec, unknown);
  const bool null_pad = keys.is_null("pad_token_id");
  if (null_pad) keys.refuse("pad_token_id", "a token, as images stand on its embedding");
  read_tokens(keys, spec);
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

KeyRows rows_of_vision() {
  return {
      said("attention_bias", false),
      written("attention_dropout", &Gemma4Vision::attention_dropout),
      dtype_row("dtype"),
      size("head_dim", &Gemma4Vision::head_dim),
      gelu_row(),
      size("hidden_size", &Gemma4Vision::hidden_size, kVisionWidth),
      written("initializer_range", &ModelSpec::initializer_range),
      size("intermediate_size", &Gemma4Vision::intermediate_size),
      always("model_type", "gemma4_vision", "the vision tower of this family"),
      size("num_attention_heads", &Gemma4Vision::num_attention_heads),
      size("num_hidden_layers", &Gemma4Vision::num_hidden_layers, kLayers),
      size("num_key_value_heads", &Gemma4Vision::num_key_value_heads),
      size("patch_size", &Gemma4Vision::patch_size, {1, 4096}),
      size("pooling_kernel_size", &Gemma4Vision::pooling_kernel_size, {1, 4096}),
      size("position_embedding_size", &Gemma4Vision::position_embedding_size),
      row("rms_norm_eps", &Gemma4Vision::rms_norm_eps, kEps),
      written({"rope_parameters"},
              [](const ModelSpec& spec) -> Json {
                return {{"rope_theta", spec.gemma4->vision->rope_theta}, {"rope_type", "axial"}};
              }),
      row("standardize", &Gemma4Vision::standardize),
      always("use_clipped_linears", false, "clipped projections are not supported"),
      // Weights are drawn by the text's range; transformers never reads the second; by the last
      // the processor resizes images.
      ignored({"initializer_range", "max_position_embeddings", "default_output_length"}),
  };
}

void read_vision(ConfigReader& keys, Purpose purpose, ModelSpec& spec,
                 std::vector<std::string>& unknown) {
  Gemma4Vision& vision = spec.gemma4->vision.emplace();
  read_rows(rows_of_vision(), keys, spec);
  vision.attention_dropout = read_attention_dropout(keys, purpose);
  keys.expect("global_head_dim", vision.head_dim, "all layers of the tower have heads of head_dim");
  read_vision_rope(keys, vision, unknown);
  check_vision(keys, vision);
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

/// `left` collects the nested keys that were not used.
void read_gemma4(ConfigReader& keys, Purpose purpose, ModelSpec& spec, LeftKeys& left) {
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
    read_vision(vision_keys, purpose, spec, left.unknown);
    settle_left_keys(vision_keys, nullptr, left);
  }
}

KeyRows rows_of_gemma4() {
  // Null: the model has no such token, as of a modality that it was published without.
  return {
      said("architectures", {"Gemma4ForConditionalGeneration"}),
      always("audio_config", nullptr, "audio is not supported"),
      row("audio_token_id", &Gemma4Spec::audio_token_id, kToken),
      row("boa_token_id", &Gemma4Spec::boa_token_id, kToken),
      row("boi_token_id", &Gemma4Spec::boi_token_id, kToken),
      dtype_row("dtype"),
      row("eoa_token_index", &Gemma4Spec::eoa_token_index, kToken),
      row("eoi_token_id", &Gemma4Spec::eoi_token_id, kToken),
      size("image_token_id", &Gemma4Spec::image_token_id, kToken),
      written("initializer_range", &ModelSpec::initializer_range),
      said("model_type", "gemma4"),
      written({"text_config"},
              [](const ModelSpec& spec) { return written_by(rows_of_text(), spec); }),
      row("tie_word_embeddings", &ModelSpec::tie_word_embeddings),
      row("video_token_id", &Gemma4Spec::video_token_id, kToken),
      written({"vision_config"},
              [](const ModelSpec& spec) {
                return spec.gemma4->vision ? written_by(rows_of_vision(), spec) : Json();
              }),
      // The text_config's count; the last two are the tokenizer's and the processor's.
      ignored({"initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "eoa_token_id",
               "vision_soft_tokens_per_image"}),
  };
}

ModelSpec spec_of_gemma4() {
  ModelSpec spec = gemma_spec(Family::kGemma4);
  spec.vocab_size = 262144;
  spec.num_hidden_layers = 30;
  spec.bos_token_id = 2;
  spec.eos_token_ids = {1};
  spec.gemma4.emplace();
  return spec;
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
      .model_type = "gemma4",
      .architecture = "Gemma4ForConditionalGeneration",
      .spec = spec_of_gemma4(),
      .rows = rows_of_gemma4(),
      .read_all = read_gemma4,
      .pins = {.strict = {}, .under_float16 = {}, .routers = {"router.proj", "router.scale"}},
      .frozen = {"model.vision_tower"},
      .attention_of = attention_of_layer,
      .key_value_heads = heads_of_layers,
      .image_tokens = tokens_of_images,
  };
  return traits;
}

}  // namespace tessera::models
