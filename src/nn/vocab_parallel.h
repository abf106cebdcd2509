// Embedding and loss where every rank of an axis holds an equal part of the vocabulary.
//
// Rank r of n has the ids [r V / n, (r + 1) V / n). A row of the embedding is found on one rank and
// is zero on the others, so what comes out is Partial; the loss needs three numbers a token from
// every rank and is the same everywhere (Invariant). Source: Megatron-LM's vocabulary-parallel
// layers. Short symbols: B rows, T positions, V vocabulary, K embedding size. Next: embedding.h,
// loss.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "nn/loss.h"
#include "parallel/axis.h"

namespace tessera::nn {

/// ids [...] i64 of the whole vocabulary, weight [V / n, K] -> [..., K], Partial. `padding`: as
/// embedding().
at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    std::optional<std::int64_t> padding,
                                    const parallel::Axis& axis);

/// logits [B, T, V / n], targets [B, T] i64 of the whole vocabulary -> [] fp32 (fp64 for fp64
/// logits), Invariant: as cross_entropy_sum() of all logits, but for the order of additions. One
/// collective, of 3 numbers a token and rank. Errors: as cross_entropy_sum.
at::Tensor vocab_parallel_cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                                            Logits use, const parallel::Axis& axis);

}  // namespace tessera::nn
