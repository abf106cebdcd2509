// Dense Qwen3: q and k are normalized per head before rope; head_dim is its own key. The text model
// of Qwen3-VL is the same for text alone: its three positions, which images make different, are
// then all the token's.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

constexpr const char* kTextOfVl = "qwen3_vl_text";

/// Makes Qwen3-VL's text_config one of Qwen3, with Qwen3-VL's values for absent keys.
void as_qwen3(const ConfigReader& keys, nlohmann::json& text) {
  if (text.value("model_type", nlohmann::json(kTextOfVl)) != kTextOfVl) {
    keys.refuse("model_type", concat("\"", kTextOfVl, "\""));
  }
  text["model_type"] = "qwen3";
  bool has_theta = text.contains("rope_theta");
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const auto record = text.find(name);
    if (record == text.end() || !record->is_object()) continue;
    has_theta = has_theta || record->contains("rope_theta");
  }
  if (!has_theta) text["rope_theta"] = 5e5;
  if (!text.contains("max_position_embeddings")) text["max_position_embeddings"] = 128000;
}

/// Names in folders of Qwen3-VL.
std::string name_in_qwen3(std::string_view name) {
  constexpr std::string_view kText = "model.language_model.";
  if (name.starts_with("model.visual.")) return {};
  return name.starts_with(kText) ? concat("model.", name.substr(kText.size())) : std::string(name);
}

}  // namespace

const FamilyTraits& qwen3_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .spec = {.family = Family::kQwen3,
               .num_key_value_heads = 32,
               .head_dim = 128,
               .max_position_embeddings = 32768},
      .rows = decoder_rows(),
      .whole = Multimodal{.architecture = "Qwen3VLForConditionalGeneration",
                          .model_type = "qwen3_vl",
                          .other_keys = {"image_token_id", "video_token_id",
                                         "vision_start_token_id", "vision_end_token_id"},
                          .as_text_model = as_qwen3},
      .module_name = name_in_qwen3,
      .qk_norm = true,
  };
  return traits;
}

}  // namespace tessera::models
