// Token embedding with a gradient that is summed in a fixed order.
//
// Next: loss.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

#include "nn/parameter.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

/// ids [...] i64, weight [V, K] -> [..., K]. The row `padding` of the weight gets no gradient from
/// here.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding = std::nullopt);

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
