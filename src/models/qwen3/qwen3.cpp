// Dense Qwen3: q and k are normalized per head before rope; head_dim is its own key.
#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {

const FamilyTraits& qwen3_traits() {
  static const FamilyTraits traits{
      .model_type = "qwen3",
      .architecture = "Qwen3ForCausalLM",
      .spec = {.family = Family::kQwen3,
               .num_key_value_heads = 32,
               .head_dim = 128,
               .max_position_embeddings = 32768},
      .rows = decoder_rows(),
      .qk_norm = true,
  };
  return traits;
}

}  // namespace tessera::models
