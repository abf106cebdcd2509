// The text model of Qwen3.5: the layers of Qwen3-Next, whose linear attention has its projections
// apart, with an MLP each. Of the three positions that images tell apart each is the token's where
// there is text alone. A folder of the whole model gives this part of it.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/qwen3_next/delta_net_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

/// Names in folders of the whole model.
std::string name_in_qwen3_5(std::string_view name) {
  constexpr std::string_view kText = "model.language_model.";
  if (name.starts_with("model.visual.")) return {};
  if (name.starts_with(kText)) return concat("model.", name.substr(kText.size()));
  return without_prediction(name);
}

}  // namespace

const FamilyTraits& qwen3_5_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3_5_text",
      .architecture = "Qwen3_5ForCausalLM",
      .spec = {.family = Family::kQwen3_5,
               .num_key_value_heads = 4,
               .head_dim = 256,
               .max_position_embeddings = 32768,
               .delta_net = DeltaNetSpec{}},
      .partial_rotary_factor = kTurnedPartOfDeltaNet,
      .rows = decoder_rows(delta_net_rows()),
      .read = read_delta_net,
      .whole = Multimodal{.architecture = "Qwen3_5ForConditionalGeneration",
                          .model_type = "qwen3_5",
                          .other_keys = {"image_token_id", "video_token_id",
                                         "vision_start_token_id", "vision_end_token_id"}},
      .module_name = name_in_qwen3_5,
      .layer_keys = kDeltaNetLayerKeys,
      .pins = delta_net_pins(),
      .norm_adds_one = true,
      .norm_rounds_once = true,
      .qk_norm = true,
      .attention_gate = true,
      .separate_delta_projections = true,
  };
  return traits;
}

}  // namespace tessera::models
