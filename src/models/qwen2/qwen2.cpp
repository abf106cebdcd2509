// Dense Qwen2 and Qwen2.5: biases on q, k and v and none on o, no q/k norm; from max_window_layers
// on layers may see a window.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// A window counts only where it is switched on: published files name one that is not.
void read_windows(ConfigReader& keys, ModelSpec& spec) {
  const bool on = keys.boolean("use_sliding_window").value_or(false);
  const bool has_window = !keys.is_null("sliding_window");
  const std::int64_t window = keys.integer("sliding_window", kSize).value_or(4096);
  const std::int64_t first = keys.integer("max_window_layers", {0, kLayers.max}).value_or(28);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    const bool slides = on && has_window && i >= first;
    spec.layer_types.push_back(slides ? LayerType::kSliding : LayerType::kFull);
  }
  read_layer_types(keys, spec);
  if (std::ranges::count(spec.layer_types, LayerType::kSliding) == 0) {
    spec.layer_types.clear();
    return;
  }
  if (!on) keys.refuse("use_sliding_window", "true, as layer_types has sliding layers");
  if (!has_window) keys.refuse("sliding_window", "a window, as layer_types has sliding layers");
  spec.sliding_window = window;
}

void read_qwen2(ConfigReader& keys, ModelSpec& spec) {
  keys.expect("attention_bias", true, "q, k and v of this family have biases, o has none");
  spec.attention_bias = true;
  keys.expect("use_mrope", false, "positions in several dims are not supported");
  read_windows(keys, spec);
}

void write_qwen2(const ModelSpec& spec, nlohmann::ordered_json& json) {
  const bool slides = !spec.layer_types.empty();
  if (slides) json["layer_types"] = layer_types_json(spec.layer_types);
  const auto first = std::ranges::find(spec.layer_types, LayerType::kSliding);
  json["max_window_layers"] = slides ? first - spec.layer_types.begin() : spec.num_hidden_layers;
  json["sliding_window"] = nullptr;
  if (slides) json["sliding_window"] = spec.sliding_window;
  json["use_sliding_window"] = slides;
}

}  // namespace

const FamilyTraits& qwen2_traits() {
  static const FamilyTraits traits{
      .family = Family::kQwen2,
      .model_type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = 32,
      .default_max_position_embeddings = 32768,
      .has_mlp_bias = false,
      .own_keys = {"attention_bias", "layer_types", "max_window_layers", "sliding_window",
                   "use_sliding_window"},
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .output_bias = false,
      .read = read_qwen2,
      .write = write_qwen2,
  };
  return traits;
}

}  // namespace tessera::models
