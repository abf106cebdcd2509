// Dense Mistral: every layer sees a window, or none does (sliding_window null, from v0.2 on).
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mistral(ConfigReader& keys, ModelSpec& spec) {
  keys.expect("attention_bias", false, "projections of this family have no bias");
  keys.expect("layer_types", nullptr,
              "sliding_window holds for all layers of this family; layers in turn are Ministral's");
  const bool null_window = keys.is_null("sliding_window");
  const std::int64_t window = keys.integer("sliding_window", kSize).value_or(4096);
  keys.expect("use_sliding_window", !null_window, "sliding_window alone says it");
  if (null_window) return;
  spec.sliding_window = window;
  spec.layer_types.assign(static_cast<std::size_t>(spec.num_hidden_layers), LayerType::kSliding);
}

void write_mistral(const ModelSpec& spec, nlohmann::ordered_json& json) {
  json["sliding_window"] = nullptr;
  if (spec.sliding_window > 0) json["sliding_window"] = spec.sliding_window;
}

}  // namespace

const FamilyTraits& mistral_traits() {
  static const FamilyTraits traits{
      .family = Family::kMistral,
      .model_type = "mistral",
      .architecture = "MistralForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = 8,
      .default_max_position_embeddings = 131072,
      .has_mlp_bias = false,
      .own_keys = {"attention_bias", "layer_types", "sliding_window", "use_sliding_window"},
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .read = read_mistral,
      .write = write_mistral,
  };
  return traits;
}

}  // namespace tessera::models
