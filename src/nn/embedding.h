// Token embedding with a gradient that is summed in a fixed order, also for a vocabulary that is
// cut over ranks.
//
// Rank r of the axis owns tokens r V/size to (r + 1) V/size - 1: rows of the embedding, as loss.h
// has the columns of the logits. Next: loss.h, ../parallel/transitions.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

#include "nn/parameter.h"
#include "nn/tensor_region.h"
#include "parallel/axis.h"

namespace tessera::nn {

/// ids [...] i64, weight [V, K] -> [..., K]. The row `padding` of the weight gets no gradient from
/// here.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding = std::nullopt);

/// ids [...] i64, the same on every rank; weight [V / size, K] -> [..., K], zeros for tokens of
/// other ranks. The row of token `padding` gets no gradient. Placement: R -> P; the weight S(0). No
/// communication. Errors: kFormat for a token outside 0..V-1 (check_range).
at::Tensor vocab_parallel_embedding(const at::Tensor& ids, const at::Tensor& weight,
                                    const parallel::Axis& axis,
                                    std::optional<std::int64_t> padding = std::nullopt);

/// Embeddings [..., K] times the root of K as their dtype holds it, as Gemma has them.
at::Tensor scaled_by_root(const at::Tensor& embedded);

/// Checks tokens on the CPU only: on a device the host would have to wait for them, so they are
/// checked before they are moved there. Errors: kFormat for a value outside 0..vocabulary-1, unless
/// it is `ignored`; `what` begins the message.
void check_range(const at::Tensor& tokens, std::int64_t vocabulary,
                 std::optional<std::int64_t> ignored, const char* what);

class Embedding : public PlacedModule {
 public:
  /// `vocabulary` of this rank.
  Embedding(std::int64_t vocabulary, std::int64_t size,
            std::optional<std::int64_t> padding = std::nullopt, const TensorRegion& region = {});
  /// ids [B, T] -> [B, T, K] of the stream.
  at::Tensor forward(const at::Tensor& ids);

  at::Tensor weight;  ///< [V, K]

 private:
  TensorRegion region_;
  std::optional<std::int64_t> padding_;
};

}  // namespace tessera::nn
