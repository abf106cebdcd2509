#include "models/kept_activations.h"

#include <optional>
#include <string>

#include "models/gemma4/gemma4_keeps.h"
#include "models/model_keeps.h"
#include "tessera/error.h"

namespace tessera::models {

const KeptActivations::InMode& KeptActivations::in(RecomputeMode mode) const {
  switch (mode) {
    case RecomputeMode::kFull:
      return full;
    case RecomputeMode::kSelective:
      return selective;
    case RecomputeMode::kNone:
      break;
  }
  return none;
}

KeptActivations kept_activations(const ForwardCase& forward) {
  using nn::LayerKeeps;
  const bool gemma4 = forward.spec.gemma4.has_value();
  const std::string text = gemma4 ? "model.language_model." : "model.";
  ModelKeeps model(forward);
  LayerKeeps& layers = model.layers();
  // Gemma looks up a copy of the ids, in which images are padding.
  nn::KeptValue x = layers.embedding(text + "embed_tokens",
                                     gemma4 ? LayerKeeps::Ids::kCopied : LayerKeeps::Ids::kOfBatch);
  std::optional<Gemma4Keeps> gemma;
  if (gemma4) {
    x = layers.made_like(x);
    gemma.emplace(model);
  }
  for (std::int64_t i = 0; i < forward.spec.num_hidden_layers; ++i) {
    const std::string layer = concat(text, "layers.", i, ".");
    x = gemma ? gemma->layer(x, i, layer) : model.decoder_layer(x, i, layer);
  }
  const bool softcap = gemma4 && forward.spec.gemma4->final_logit_softcapping;
  layers.loss(layers.norm(x, text + "norm"), "lm_head",
              softcap ? LayerKeeps::Softcap::kYes : LayerKeeps::Softcap::kNo);
  return {layers.ledger().in(RecomputeMode::kNone), layers.ledger().in(RecomputeMode::kFull),
          layers.ledger().in(RecomputeMode::kSelective)};
}

}  // namespace tessera::models
