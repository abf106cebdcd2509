// SmolLM3: Llama whose every fourth layer has no rope.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

/// Where windows are on, they are those of the layers without rope.
void read_smollm3(ConfigReader& keys, ModelSpec& spec) {
  const std::vector<bool> have_rope = read_rope_layers(keys, spec.num_hidden_layers);
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    if (!have_rope[static_cast<std::size_t>(i)]) spec.layers_without_rope.push_back(i);
  }
  read_optional_windows(keys, spec, [&](std::int64_t layer) { return !spec.has_rope(layer); });
}

Json layers_with_rope(const ModelSpec& spec) {
  auto ropes = Json::array();
  for (std::int64_t i = 0; i < spec.num_hidden_layers; ++i) {
    ropes.push_back(spec.has_rope(i) ? 1 : 0);
  }
  return ropes;
}

}  // namespace

const FamilyTraits& smollm3_traits() {
  static const FamilyTraits traits{
      .model_type = "smollm3",
      .architecture = "SmolLM3ForCausalLM",
      .spec = {.family = Family::kSmolLm3,
               .num_key_value_heads = 4,
               .max_position_embeddings = 32768,
               .tie_word_embeddings = true,
               .rope = {.theta = 2e6},
               .pad_token_id = 128004},
      .rows = decoder_rows(joined({
          optional_window_rows(),
          {
              row("mlp_bias", &ModelSpec::mlp_bias), written({"no_rope_layers"}, layers_with_rope),
              // An absent padding token is not null.
              written("pad_token_id", &ModelSpec::pad_token_id),
              ignored({"pretraining_tp"}),  // published ones say 2; transformers has no use for it
          },
      })),
      .read = read_smollm3,
  };
  return traits;
}

}  // namespace tessera::models
