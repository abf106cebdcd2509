// Llama: no q/k norm; from 3.1 on `llama3` rope scaling; small ones tie the head to the embedding.
#include "models/family.h"

namespace tessera::models {

const FamilyTraits& llama_traits() {
  static const FamilyTraits traits{
      .family = Family::kLlama,
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .default_head_dim = std::nullopt,
      .default_num_key_value_heads = std::nullopt,
      .default_max_position_embeddings = 2048,
      .has_mlp_bias = true,
      .pins = {},
      .frozen = {},
      .module_name = [](std::string_view name) { return std::string(name); },
  };
  return traits;
}

}  // namespace tessera::models
