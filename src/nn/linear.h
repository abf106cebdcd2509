// Linear: x W^T + b, computed in the weight's dtype, returned in the input's.
//
// Short symbols: B rows, T positions, K inputs, N outputs. Next: rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

/// x [..., K], weight [N, K], bias [N] or undefined -> [..., N] in x's dtype.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

enum class Bias : std::uint8_t { kNo, kYes };

class Linear : public torch::nn::Module {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, Bias with_bias = Bias::kNo);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  ///< [out, in]
  at::Tensor bias;    ///< [out] or undefined
};

}  // namespace tessera::nn
