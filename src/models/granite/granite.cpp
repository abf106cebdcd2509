// Granite: Llama with four numbers that scale the embedding, what each half of a layer adds to the
// stream, the scores of attention and the logits.
#include "models/family.h"
#include "models/spec_keys.h"

namespace tessera::models {

const FamilyTraits& granite_traits() {
  constexpr NumberRange kFactor{1e-6, 1e6};
  static const FamilyTraits traits{
      .model_type = "granite",
      .architecture = "GraniteForCausalLM",
      .spec = {.family = Family::kGranite,
               .max_position_embeddings = 2048,
               .granite = GraniteSpec()},
      .rows =
          decoder_rows({row("mlp_bias", &ModelSpec::mlp_bias),
                        row("embedding_multiplier", &GraniteSpec::embedding_multiplier, kFactor),
                        row("attention_multiplier", &GraniteSpec::attention_multiplier, kFactor),
                        row("residual_multiplier", &GraniteSpec::residual_multiplier, kFactor),
                        row("logits_scaling", &GraniteSpec::logits_scaling, kFactor)}),
  };
  return traits;
}

}  // namespace tessera::models
