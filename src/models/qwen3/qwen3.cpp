// Dense Qwen3: q and k are normalized per head before rope; head_dim is its own key.
#include "models/family.h"

namespace tessera::models {

const FamilyTraits& qwen3_traits() {
  static const FamilyTraits traits{
      .family = Family::kQwen3,
      .model_type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .default_head_dim = 128,
      .default_num_key_value_heads = 32,
      .default_max_position_embeddings = 32768,
      .has_mlp_bias = false,
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
      .qk_norm = true,
  };
  return traits;
}

}  // namespace tessera::models
