// OLMo 2: norms behind attention and MLP instead of before them, and queries and keys normed over
// all their heads together.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {
const FamilyTraits& olmo2_traits() {
  static const FamilyTraits traits{
      .model_type = "olmo2",
      .architecture = "Olmo2ForCausalLM",
      .spec = {.family = Family::kOlmo2,
               .max_position_embeddings = 2048,
               .rms_norm_eps = 1e-5,
               .pad_token_id = 1},
      // An absent padding token is not null.
      .rows = decoder_rows({written("pad_token_id", &ModelSpec::pad_token_id)}),
      .norms = NormPlacement::kAfter,
      .norm_rounds_once = true,
      .qk_norm_over_heads = true,
  };
  return traits;
}

}  // namespace tessera::models
