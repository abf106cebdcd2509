// What autograd holds of Gemma 4's layers until their backward (gemma4_layer.cpp), text alone. Pure.
// Next: ../keeps/kept_activations.h.
#pragma once

#include <cstdint>
#include <string>

#include "models/keeps/model_keeps.h"

namespace tessera::models {

class Gemma4Keeps {
 public:
  /// Makes what all layers share.
  explicit Gemma4Keeps(ModelKeeps& model);

  nn::KeptValue layer(const nn::KeptValue& x, std::int64_t number, const std::string& name);

 private:
  bool sees_window(const Gemma4Layer& layer) const;
  nn::KeptValue attention(const nn::KeptValue& stream, const Gemma4Layer& layer,
                          const std::string& name);
  moe::KeptRouting route(const nn::KeptValue& x, const std::string& name);
  nn::KeptValue experts(const nn::KeptValue& x, const std::string& name);

  ModelKeeps& model_;
  nn::LayerKeeps& layers_;
  const ModelSpec& spec_;
  nn::KeptValue mask_;  ///< of sliding layers, one for all
};

}  // namespace tessera::models
