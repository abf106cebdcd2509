// Kept activations: what autograd holds of one forward until its backward, in bytes, for any model
// and any degrees, without a tensor.
//
// The layers' forward once more, operation by operation: which tensors each saves, and whose memory
// they are. Memory counts once however many operations save it; parameters, tables and the batch
// itself do not count. A layer that computes in another way is changed here, too:
// tests/unit/train/memory_table_test.cpp counts the bytes of real runs. It follows the kernels of
// CPUs, and text: a vision tower that is trained is left out. Short symbols: B rows, T positions, H
// hidden, E experts, K experts a token. Pure. Next: ../train/rank_memory.h.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/parallel_dims.h"
#include "models/model_spec.h"
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
};

/// Of a rank; where experts lie on several ranks, with as many tokens for each rank.
struct KeptActivations {
  struct InMode {
    std::int64_t kept = 0;  ///< when the forward has ended
    /// The most until backward has ended, with what one layer keeps that is run again. Gradients
    /// of activations come on top.
    std::int64_t peak = 0;
  };
  InMode none, full, selective;
  const InMode& in(RecomputeMode mode) const;
};

KeptActivations kept_activations(const ForwardCase& forward);

}  // namespace tessera::models
