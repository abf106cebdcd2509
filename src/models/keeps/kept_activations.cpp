#include "models/keeps/kept_activations.h"

#include <algorithm>
#include <memory>
#include <string>

#include "models/family.h"
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
  ModelKeeps model(forward);
  nn::LayerKeeps& layers = model.layers();
  const auto own = traits(forward.spec.family).keeps;
  const auto of_text = own != nullptr ? own(model) : std::make_unique<TextKeeps>(model);
  const std::string text = of_text->prefix();
  const StageLayers stage =
      forward.stage.value_or(StageLayers{true, {0, forward.spec.num_hidden_layers}, true});
  nn::KeptValue x = stage.embedding ? of_text->embedding(text + "embed_tokens")
                                    : received(layers, forward, stage.layers.begin, text);
  const std::int64_t stream = x.numel * size_of(x.dtype);
  of_text->enter_layers();
  for (std::int64_t i = stage.layers.begin; i < stage.layers.end; ++i) {
    x = of_text->layer(x, i, concat(text, "layers.", i, "."));
  }
  if (stage.head) layers.loss(layers.norm(x, text + "norm"), "lm_head", of_text->softcap());
  return {.none = layers.ledger().in(RecomputeMode::kNone),
          .full = layers.ledger().in(RecomputeMode::kFull),
          .selective = layers.ledger().in(RecomputeMode::kSelective),
          .deferred = layers.ledger().deferred(),
          .stream = stream};
}

}  // namespace tessera::models
