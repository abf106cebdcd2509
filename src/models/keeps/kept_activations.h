// Kept activations: the bytes that autograd holds of one forward until its backward, and that both
// send over the model axes, for any model and any degrees, without a tensor.
//
// What each layer keeps is said on the layer's own floor (nn/keeps/layer_keeps.h,
// moe/expert_keeps.h), and put together here and in gemma4/gemma4_layers.h. tests/unit/train/memory_table_test.cpp counts
// the bytes of real runs. Text alone: a vision tower that is trained is left out. Pure. Next:
// ../train/rank_memory.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "models/stage_layers.h"
#include "moe/expert_keeps.h"
#include "nn/keeps/layer_keeps.h"
#include "tessera/contract.h"
#include "tessera/recompute_mode.h"

namespace tessera::models {

/// One forward of one rank.
struct ForwardCase {
  const ModelSpec& spec;
  ParallelDims degrees;
  const std::vector<GradContract>& parameters;  ///< of the whole model, adapters included
  std::int64_t rows = 1;                        ///< B of a micro-batch
  std::int64_t positions = 0;                   ///< T of a row, whatever tp cuts
  bool score_before_experts = false;
  /// The routers' probabilities are asked for, as the auxiliary loss does.
  bool router_probabilities = false;
  /// Of a pipeline, whose stages before it send what they made; none = the whole model.
  std::optional<StageLayers> stage = {};
  int tp_rank = 0;  ///< where parts are unequal the first ones are the largest
  /// The dtype in which sums of activations travel; none: their own.
  std::optional<DType> activation_reduce = {};
};

/// Of a rank; where experts lie on several ranks, with as many tokens for each rank.
struct KeptActivations {
  using InMode = nn::KeptBytes;
  InMode none, full, selective;
  /// What products of weights wait for from an input gradient on, where they are put off: their
  /// inputs, and gradients of their results. The head's is never put off.
  std::int64_t deferred = 0;
  std::int64_t stream = 0;   ///< what a layer gives to the next one
  bool input_wants = false;  ///< a gradient, where another stage has made it
  nn::KeepsLedger ledger = {};
  const InMode& in(RecomputeMode mode) const;
  /// One mode a layer of the stage.
  InMode in(std::span<const RecomputeMode> modes) const { return ledger.in(modes); }
};

KeptActivations kept_activations(const ForwardCase& forward);

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
  nn::KeptValue routed_part(const nn::KeptValue& entered);
  /// What experts get of routed tokens, as expert_tokens.cpp sends and returns it.
  nn::KeptValue through_experts(const nn::KeptValue& routed, const moe::KeptRouting& routing,
                                const std::string& name);
  nn::KeptValue leave_experts(const nn::KeptValue& y);

  /// decoder.cpp.
  nn::KeptValue embedding(const std::string& name);
  /// decoder_layer.cpp.
  nn::KeptValue decoder_layer(const nn::KeptValue& x, std::int64_t number, const std::string& name);

 private:
  enum class Way : std::uint8_t { kOwn, kSliced, kAllCut, kAllRouted };
  Way way() const;
  /// Whether the router sees slices of the stream itself, whose gradients are gathered.
  bool slices_stream() const;
  /// This rank's share of the rows, which tp divides.
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
  struct Names {
    std::string embedding;
    std::string layers;  ///< before "N."
    std::string norm;    ///< the last one
  };
  virtual Names names() const {
    const std::string text = prefix();
    return {text + "embed_tokens", text + "layers.", text + "norm"};
  }
  virtual nn::KeptValue embedding(const std::string& name) { return model_.embedding(name); }
  virtual nn::KeptValue norm(const nn::KeptValue& x, const std::string& name) {
    return model_.layers().norm(x, name);
  }
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
