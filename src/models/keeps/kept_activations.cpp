#include "models/keeps/kept_activations.h"

#include <algorithm>
#include <optional>
#include <string>

#include "models/gemma4/gemma4_keeps.h"
#include "models/keeps/model_keeps.h"
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

namespace {

/// What another stage made. It wants a gradient where anything before it is trained.
nn::KeptValue received(nn::LayerKeeps& layers, const ForwardCase& forward, std::int64_t begin,
                       const std::string& text) {
  const std::string of_layers = text + "layers.";
  const auto is_before = [&](const std::string& name) {
    if (!name.starts_with(of_layers)) {
      return name != "lm_head.weight" && name != text + "norm.weight";
    }
    return std::stoll(name.substr(of_layers.size())) < begin;
  };
  const bool wants = std::ranges::any_of(forward.parameters, [&](const GradContract& each) {
    return each.trainable && is_before(each.name);
  });
  const std::int64_t parts = layers.of().cut ? layers.of().tp : 1;
  return layers.ledger().make(layers.tokens() / parts * forward.spec.hidden_size,
                              layers.parameter(text + "embed_tokens.weight").compute.dtype, wants);
}

}  // namespace

KeptActivations kept_activations(const ForwardCase& forward) {
  using nn::LayerKeeps;
  const bool gemma4 = forward.spec.gemma4.has_value();
  const std::string text = gemma4 ? "model.language_model." : "model.";
  ModelKeeps model(forward);
  LayerKeeps& layers = model.layers();
  const StageLayers stage =
      forward.stage.value_or(StageLayers{true, 0, forward.spec.num_hidden_layers, true});
  // Gemma looks up a copy of the ids, in which images are padding.
  nn::KeptValue x =
      stage.embedding ? layers.embedding(text + "embed_tokens", gemma4 ? LayerKeeps::Ids::kCopied
                                                                       : LayerKeeps::Ids::kOfBatch)
                      : received(layers, forward, stage.begin, text);
  const std::int64_t stream = x.numel * size_of(x.dtype);
  std::optional<Gemma4Keeps> gemma;
  if (gemma4) {
    if (stage.embedding) x = layers.made_like(x);
    gemma.emplace(model);
  }
  for (std::int64_t i = stage.begin; i < stage.end; ++i) {
    const std::string layer = concat(text, "layers.", i, ".");
    x = gemma ? gemma->layer(x, i, layer) : model.decoder_layer(x, i, layer);
  }
  const bool softcap = gemma4 && forward.spec.gemma4->final_logit_softcapping;
  if (stage.head) {
    layers.loss(layers.norm(x, text + "norm"), "lm_head",
                softcap ? LayerKeeps::Softcap::kYes : LayerKeeps::Softcap::kNo);
  }
  return {.none = layers.ledger().in(RecomputeMode::kNone),
          .full = layers.ledger().in(RecomputeMode::kFull),
          .selective = layers.ledger().in(RecomputeMode::kSelective),
          .deferred = layers.ledger().deferred(),
          .stream = stream};
}

}  // namespace tessera::models
