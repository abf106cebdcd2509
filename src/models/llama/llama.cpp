// Llama: no q/k norm; from 3.1 on `llama3` rope scaling; small ones tie the head to the embedding.
#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {

const FamilyTraits& llama_traits() {
  static const FamilyTraits traits{
      .model_type = "llama",
      .architecture = "LlamaForCausalLM",
      .spec = {.family = Family::kLlama, .max_position_embeddings = 2048},
      .rows = decoder_rows({row("mlp_bias", &ModelSpec::mlp_bias)}),
  };
  return traits;
}

}  // namespace tessera::models
