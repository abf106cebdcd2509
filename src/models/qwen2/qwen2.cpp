// Dense Qwen2 and Qwen2.5: biases on q, k and v and none on o, no q/k norm; from max_window_layers
// on layers may see a window.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// A window counts only where it is switched on: published files name one that is not.
void read_windows(ConfigReader& keys, ModelSpec& spec) {
  const std::int64_t first = keys.integer("max_window_layers", {0, kLayers.max}).value_or(28);
  read_optional_windows(keys, spec, [first](std::int64_t layer) { return layer >= first; });
}

Json window_layers(const ModelSpec& spec) {
  const auto first = std::ranges::find(spec.layer_types, LayerType::kSliding);
  return spec.layer_types.empty() ? spec.num_hidden_layers : first - spec.layer_types.begin();
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
      .rows = decoder_rows(joined({
          optional_window_rows(),
          {
              only("attention_bias", true, "q, k and v of this family have biases, o has none"),
              only("use_mrope", false, "positions in several dims are not supported"),
              written({"max_window_layers"}, window_layers),
          },
      })),
      .read = read_windows,
      .output_bias = false,
  };
  return traits;
}

}  // namespace tessera::models
