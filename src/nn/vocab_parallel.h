// Embedding and cross entropy of a vocabulary that is cut over ranks.
//
// Rank r of the axis owns tokens r V/size to (r + 1) V/size - 1: rows of the embedding, columns of
// the logits. No rank ever holds logits of the whole vocabulary: three numbers a token travel.
// Short symbols: B rows, T positions, V vocabulary. Next: loss.h, embedding.h,
// ../parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "nn/loss.h"
#include "parallel/axis.h"

namespace tessera::nn {

/// ids [...] i64, the same on every rank; weight [V / size, K] -> [..., K], zeros for tokens of
/// other ranks. The row of token `padding` gets no gradient. Placement: R -> P; the weight S(0). No
/// communication. Errors: kFormat for a token outside 0..V-1.
at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    const parallel::Axis& axis,
                                    std::optional<std::int64_t> padding = std::nullopt);

struct VocabParallelLoss {
  parallel::Axis axis;
  std::string name = "loss";  ///< in errors about collectives
  Logits use = Logits::kKeep;
};

/// loss.h's cross_entropy_sum of logits [B, T, V / size], targets [B, T] i64 the same on every
/// rank. Placement: S(2) -> I, the same bits on every rank; the gradient needs no communication.
/// Collective; bytes a rank sends: (size - 1) x 12 B T (24 for fp64). Errors: kFormat for a target
/// outside 0..V-1 that is not -100.
at::Tensor vocab_parallel_cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                                            const VocabParallelLoss& options);

}  // namespace tessera::nn
