// What GPT-2's layers are made of and no other family's are: LayerNorm with a bias, and a linear
// layer whose matrix stands [in, out].
//
// Next: gpt2_layer.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "nn/parameter.h"
#include "nn/tensor_region.h"

namespace tessera::models {

/// The mean taken out, the variance of all columns; weight and bias in fp32 at least, rounded once.
class LayerNorm : public nn::PlacedModule {
 public:
  LayerNorm(std::int64_t size, double eps, const ParameterLayout& layout = {});
  /// x [..., K] -> [..., K] in x's dtype.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  ///< [K]

 private:
  double eps_;
};

/// x W + b with W [in, out], which is what files hold: transformers calls it Conv1D.
class TransposedLinear : public nn::PlacedModule {
 public:
  /// Sizes of this rank, and where they lie.
  struct Options {
    std::int64_t in = 0;
    std::int64_t out = 0;
    ParameterLayout weight = {};
    ParameterLayout bias = {};
    layout::FusedMatrices fused = {};
  };
  explicit TransposedLinear(const Options& options);
  /// x [..., in] -> [..., out] in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// As nn::Linear::forward_into.
  at::Tensor forward_into(const nn::TensorRegion& region, torch::nn::Module& layer,
                          const std::vector<at::Tensor>& inputs,
                          std::function<at::Tensor(const std::vector<at::Tensor>&)> inside);

  at::Tensor weight;  ///< [in, out]
  at::Tensor bias;    ///< [out]
};

/// A rank's part of the outputs.
TransposedLinear::Options column_parallel(const nn::TensorRegion& region, std::int64_t in,
                                          std::int64_t out);
/// A rank's part of the inputs.
TransposedLinear::Options row_parallel(const nn::TensorRegion& region, std::int64_t in,
                                       std::int64_t out);

}  // namespace tessera::models
