// Dense Qwen2 and Qwen2.5: biases on q, k and v and none on o, no q/k norm; from max_window_layers
// on layers may see a window.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// A window counts only where it is switched on: published files name one that is not.
void read_windows(ConfigReader& keys, ModelSpec& spec) {
  const bool on = keys.boolean("use_sliding_window").value_or(false);
  const bool has_window = spec.sliding_window > 0;
  const std::int64_t first = keys.integer("max_window_layers", {0, kLayers.max}).value_or(28);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    const bool slides = on && has_window && i >= first;
    spec.layer_types.push_back(slides ? LayerType::kSliding : LayerType::kFull);
  }
  read_layer_types(keys, spec);
  if (std::ranges::count(spec.layer_types, LayerType::kSliding) == 0) {
    spec.layer_types.clear();
    spec.sliding_window = 0;
    return;
  }
  if (!on) keys.refuse("use_sliding_window", "true, as layer_types has sliding layers");
  if (!has_window) keys.refuse("sliding_window", "a window, as layer_types has sliding layers");
}

bool slides(const ModelSpec& spec) { return !spec.layer_types.empty(); }

Json window_layers(const ModelSpec& spec) {
  const auto first = std::ranges::find(spec.layer_types, LayerType::kSliding);
  return slides(spec) ? first - spec.layer_types.begin() : spec.num_hidden_layers;
}

}  // namespace

const FamilyTraits& qwen2_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen2",
      .architecture = "Qwen2ForCausalLM",
      .spec = {.family = Family::kQwen2,
               .num_key_value_heads = 32,
               .max_position_embeddings = 32768,
               .attention_bias = true,
               .sliding_window = 4096},
      .rows = decoder_rows({
          only("attention_bias", true, "q, k and v of this family have biases, o has none"),
          only("use_mrope", false, "positions in several dims are not supported"),
          written({"layer_types"},
                  [](const ModelSpec& spec) {
                    return slides(spec) ? layer_types_json(spec) : left_out();
                  }),
          written({"max_window_layers"}, window_layers),
          window_row(),
          written({"use_sliding_window"}, slides),
      }),
      .read = read_windows,
      .output_bias = false,
  };
  return traits;
}

}  // namespace tessera::models
