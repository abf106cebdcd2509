// Dense Mistral: every layer sees a window, or none does (sliding_window null, from v0.2 on).
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

void read_mistral(ConfigReader& keys, ModelSpec& spec) {
  const bool slides = spec.sliding_window > 0;
  keys.expect("use_sliding_window", slides, "sliding_window alone says it");
  if (slides) set_all_sliding(spec);
}

}  // namespace

const FamilyTraits& mistral_traits() {
  static const FamilyTraits traits{
      .model_type = "mistral",
      .architecture = "MistralForCausalLM",
      .spec = {.family = Family::kMistral,
               .num_key_value_heads = 8,
               .max_position_embeddings = 131072,
               .sliding_window = 4096},
      .rows = decoder_rows({
          only("attention_bias", false, kNoBiases),
          only("layer_types", nullptr,
               "sliding_window holds for all layers of this family; layers in turn are "
               "Ministral's"),
          window_row(),
      }),
      .read = read_mistral,
  };
  return traits;
}

}  // namespace tessera::models
