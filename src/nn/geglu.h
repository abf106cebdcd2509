// The MLP gated by GELU: down(gelu(gate(x)) * up(x)), gelu in its tanh form.
//
// Next: grouped_linear.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "nn/linear.h"

namespace tessera::nn {

/// gelu_tanh(gate) * up, elementwise.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

class GegluMlp : public torch::nn::Module {
 public:
  /// `intermediate_size` of this rank.
  GegluMlp(std::int64_t hidden_size, std::int64_t intermediate_size,
           WeightName weight_name = WeightName::kOwn, const TensorRegion& region = {});
  /// x [..., hidden] of the stream -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x);

 private:
  TensorRegion region_;
  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

}  // namespace tessera::nn
