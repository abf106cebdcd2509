// What autograd holds of a decoder's layers until their backward, put together of what the floors
// below say: nn/layer_keeps.h, moe/expert_keeps.h. Pure. Next: kept_activations.h,
// ../gemma4/gemma4_keeps.h.
#pragma once

#include <cstdint>
#include <string>

#include "models/keeps/kept_activations.h"
#include "moe/expert_keeps.h"
#include "nn/layer_keeps.h"

namespace tessera::models {

/// One forward of a model: its layers one after the other.
class ModelKeeps {
 public:
  explicit ModelKeeps(const ForwardCase& of);
  ModelKeeps(const ModelKeeps&) = delete;
  ModelKeeps& operator=(const ModelKeeps&) = delete;

  const ForwardCase& of() const { return of_; }
  nn::LayerKeeps& layers() { return layers_; }
  moe::ExpertKeeps& experts() { return experts_; }

  /// expert_tokens.cpp: which tokens a rank routes and which it sends.
  nn::KeptValue enter_experts(const nn::KeptValue& x);
  nn::KeptValue routed_part(const nn::KeptValue& entered) const;
  /// What experts get of routed tokens, as expert_tokens.cpp sends and returns it.
  nn::KeptValue through_experts(const nn::KeptValue& routed, const moe::KeptRouting& routing,
                                const std::string& name);
  nn::KeptValue leave_experts(const nn::KeptValue& y);

  /// decoder_layer.cpp.
  nn::KeptValue decoder_layer(const nn::KeptValue& x, std::int64_t number, const std::string& name);

 private:
  enum class Way : std::uint8_t { kOwn, kSliced, kAllCut, kAllRouted };
  Way way() const;
  nn::KeptValue part(nn::KeptValue x) const;
  nn::KeptValue attention(const nn::KeptValue& x, std::int64_t number, const std::string& name);
  /// moe_layer.cpp.
  nn::KeptValue moe_layer(const nn::KeptValue& x, const std::string& name);

  const ForwardCase of_;
  nn::LayerKeeps layers_;
  moe::ExpertKeeps experts_;
};

/// From the embedding to the head, as a decoder does it; a family with a module of its own says what
/// is different (family.h).
class TextKeeps {
 public:
  explicit TextKeeps(ModelKeeps& model) : model_(model) {}
  virtual ~TextKeeps() = default;
  TextKeeps(const TextKeeps&) = delete;
  TextKeeps& operator=(const TextKeeps&) = delete;

  /// What stands before "embed_tokens", "layers.N." and "norm".
  virtual std::string prefix() const { return "model."; }
  virtual nn::KeptValue embedding(const std::string& name) {
    return model_.layers().embedding(name, nn::LayerKeeps::Ids::kOfBatch);
  }
  /// What all layers share is made.
  virtual void enter_layers() {}
  virtual nn::KeptValue layer(const nn::KeptValue& x, std::int64_t number,
                              const std::string& name) {
    return model_.decoder_layer(x, number, name);
  }
  virtual nn::LayerKeeps::Softcap softcap() const { return nn::LayerKeeps::Softcap::kNo; }

 protected:
  ModelKeeps& model() { return model_; }
  const ModelKeeps& model() const { return model_; }

 private:
  ModelKeeps& model_;
};

}  // namespace tessera::models
