// Token embedding with a gradient that is summed in a fixed order.
//
// Next: loss.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

/// ids [...] i64, weight [V, K] -> [..., K]. The row `padding` of the weight gets no gradient from
/// here.
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<std::int64_t> padding = std::nullopt);

/// The same out of ATen operations.
at::Tensor embedding_composite(const at::Tensor& ids, const at::Tensor& weight,
                               std::optional<std::int64_t> padding = std::nullopt);

class Embedding : public torch::nn::Module {
 public:
  Embedding(std::int64_t vocabulary, std::int64_t size,
            std::optional<std::int64_t> padding = std::nullopt);
  at::Tensor forward(const at::Tensor& ids);

  at::Tensor weight;  ///< [V, K]

 private:
  std::optional<std::int64_t> padding_;
};

}  // namespace tessera::nn
