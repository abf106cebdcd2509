// The text model of Gemma 3: sliding layers and full ones with ropes of their own, four norms a
// layer that multiply by 1 + weight, queries and keys normed per head, a scaled embedding that is
// the head too. A folder of the whole model with its vision tower gives this part of it.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/gemma3/gemma_keys.h"
#include "models/keys/known_keys.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kPattern = 6;  ///< every n-th layer is a full one
constexpr double kLocalTheta = 1e4;
constexpr const char* kNoSoftCaps = "soft caps are not supported in this family";

bool is_full(std::int64_t layer, std::int64_t pattern) { return (layer + 1) % pattern == 0; }

void read_layers(ConfigReader& keys, ModelSpec& spec) {
  const IntRange range{1, kLayers.max};
  // transformers' own copy of it; layer_types is read from it where it is not there itself.
  const auto written = keys.integer("_sliding_window_pattern", range);
  const std::int64_t pattern =
      keys.integer("sliding_window_pattern", range).value_or(written.value_or(kPattern));
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    spec.layer_types.push_back(is_full(i, pattern) ? LayerType::kFull : LayerType::kSliding);
  }
  read_layer_types(keys, spec);
}

/// Refuses a record that has the kind of its rope as "type" alone: transformers does not read that
/// key here and computes the default rope.
void require_rope_type(const nlohmann::json* record, const std::string& path) {
  const auto present = [&](const char* key) {
    const auto found = record->find(key);
    return found != record->end() && !found->is_null();
  };
  if (record == nullptr || !record->is_object() || !present("type") || present("rope_type") ||
      (*record)["type"] == "default") {
    return;
  }
  ConfigReader(*record, path).refuse("type", "rope_type in its place, as transformers reads it");
}

/// Reads rope_parameters, which holds one record per type of layers, or the old spelling:
/// rope_scaling and rope_theta for full layers, rope_local_base_freq for sliding ones. Both may be
/// present.
void read_ropes(ConfigReader& keys, ModelSpec& spec, LeftKeys& left) {
  RopeAround full{.theta = keys.number("rope_theta", kTheta).value_or(spec.rope.theta),
                  .max_position_embeddings = spec.max_position_embeddings};
  RopeAround sliding = full;
  sliding.theta = keys.number("rope_local_base_freq", kTheta).value_or(kLocalTheta);
  const auto read = [&](ConfigReader& from, std::string_view key, const std::string& path,
                        const RopeAround& around) {
    const nlohmann::json* record = from.take(key);
    if (record == nullptr) return nn::RopeOptions{.theta = around.theta};
    if (!record->is_object()) from.refuse(key, "an object or null");
    return read_rope_record(*record, concat(path, key, "."), around, left);
  };
  const nlohmann::json* parameters = keys.take("rope_parameters");
  if (parameters == nullptr) {
    require_rope_type(keys.find("rope_scaling"), "rope_scaling.");
    spec.rope = read(keys, "rope_scaling", "", full);
    spec.sliding_rope = nn::RopeOptions{.theta = sliding.theta};
    return;
  }
  if (!parameters->is_object()) keys.refuse("rope_parameters", "an object, one record a type");
  ConfigReader types(*parameters, "rope_parameters.");
  for (const char* type : {kFullAttention, kSlidingAttention}) {
    require_rope_type(types.find(type), concat("rope_parameters.", type, "."));
  }
  spec.rope = read(types, kFullAttention, "rope_parameters.", full);
  spec.sliding_rope = read(types, kSlidingAttention, "rope_parameters.", sliding);
  const auto check = [&](const char* key, const char* type) {
    const nlohmann::json* record = types.take(type);
    if (record != nullptr)
      check_repeated(keys, key, *record, concat("rope_parameters.", type), "rope_theta");
  };
  check("rope_theta", kFullAttention);
  check("rope_local_base_freq", kSlidingAttention);
  const nlohmann::json* scaling = keys.take("rope_scaling");
  if (scaling != nullptr && !says_nothing(*scaling)) {
    full.theta = spec.rope.theta;  // rope_scaling has none
    const nlohmann::json* record = types.find(kFullAttention);
    check_same_rope(keys, read(keys, "rope_scaling", "", full), spec.rope,
                    record == nullptr ? nlohmann::json::object() : *record,
                    concat("rope_parameters.", kFullAttention));
  }
  std::ranges::move(types.unknown(), std::back_inserter(left.unknown));
}

Json scalar(const ModelSpec& spec) {
  const double value = *spec.query_pre_attn_scalar;
  const auto whole = static_cast<std::int64_t>(value);
  if (static_cast<double>(whole) == value) return whole;
  return value;
}

Json pattern(const ModelSpec& spec) {
  const auto first = std::ranges::find(spec.layer_types, LayerType::kFull);
  if (first == spec.layer_types.end()) return left_out();
  return first - spec.layer_types.begin() + 1;
}

ModelSpec spec_of_gemma3() {
  ModelSpec spec = gemma_spec(Family::kGemma3);
  spec.vocab_size = 262208;
  spec.num_hidden_layers = 26;
  spec.rope.theta = 1e6;
  spec.sliding_window = 4096;
  spec.query_pre_attn_scalar = 256.0;
  return spec;
}

/// Names in folders of the whole model, as they are published and as transformers has them.
std::string name_of_text(std::string_view name) {
  constexpr std::string_view kPublished = "language_model.";
  constexpr std::string_view kInside = "model.language_model.";
  for (const std::string_view seeing : {"vision_tower.", "multi_modal_projector.",
                                        "model.vision_tower.", "model.multi_modal_projector."}) {
    if (name.starts_with(seeing)) return {};
  }
  if (name.starts_with(kPublished)) return std::string(name.substr(kPublished.size()));
  if (name.starts_with(kInside)) return concat("model.", name.substr(kInside.size()));
  return std::string(name);
}

}  // namespace

const FamilyTraits& gemma3_traits() {
  static const FamilyTraits traits{
      .model_type = "gemma3_text",
      .architecture = "Gemma3ForCausalLM",
      .spec = spec_of_gemma3(),
      .rows = decoder_rows({
          {"hidden_act", read_activation},
          always("attn_logit_softcapping", nullptr, kNoSoftCaps),
          always("final_logit_softcapping", nullptr, kNoSoftCaps),
          gelu_row(),
          written({"layer_types"}, layer_types_json),
          // An absent one is not null.
          written("pad_token_id", &ModelSpec::pad_token_id),
          written(row("query_pre_attn_scalar", &ModelSpec::query_pre_attn_scalar, {1e-6, 1e9},
                      Null::kAbsent),
                  scalar),
          written({"rope_local_base_freq"},
                  [](const ModelSpec& spec) { return spec.sliding_rope->theta; }),
          size("sliding_window", &ModelSpec::sliding_window),
          written({"sliding_window_pattern"}, pattern),
          only("use_bidirectional_attention", false, "attention is causal"),
          ignored({"cache_implementation"}),
      }),
      .read = read_layers,
      .read_ropes = read_ropes,
      .whole = Multimodal{.architecture = "Gemma3ForConditionalGeneration",
                          .model_type = "gemma3",
                          .other_keys = {"boi_token_index", "eoi_token_index", "image_token_index",
                                         "boi_token_id", "eoi_token_id", "image_token_id",
                                         "mm_tokens_per_image"}},
      .module_name = name_of_text,
      .norms = NormPlacement::kAround,
      .norm_adds_one = true,
      .norm_rounds_once = true,
      .qk_norm = true,
      .mlp_activation = MlpActivation::kGeglu,
      .scaled_embedding = true,
  };
  return traits;
}

}  // namespace tessera::models
