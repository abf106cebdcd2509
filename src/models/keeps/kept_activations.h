// Kept activations: what autograd holds of one forward until its backward, in bytes, for any model
// and any degrees, without a tensor.
//
// What each layer keeps is said on the layer's own floor: nn/layer_keeps.h, moe/expert_keeps.h, and
// here model_keeps.h and gemma4/gemma4_keeps.h. tests/unit/train/memory_table_test.cpp counts the
// bytes of real runs. Text alone: a vision tower that is trained is left out. Pure. Next:
// ../train/rank_memory.h.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
#include "models/stage_layers.h"
#include "nn/layer_keeps.h"
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
};

/// Of a rank; where experts lie on several ranks, with as many tokens for each rank.
struct KeptActivations {
  using InMode = nn::KeptBytes;
  InMode none, full, selective;
  /// What products of weights wait for from an input gradient on, where they are put off: their
  /// inputs, and gradients of their results. The head's is never put off.
  std::int64_t deferred = 0;
  std::int64_t stream = 0;  ///< what a layer gives to the next one
  const InMode& in(RecomputeMode mode) const;
};

KeptActivations kept_activations(const ForwardCase& forward);

}  // namespace tessera::models
