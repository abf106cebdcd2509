// The gated MLP: down(silu(gate(x)) * up(x)).
//
// Next: embedding.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "nn/linear.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

/// silu(gate) * up, elementwise.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

class Mlp : public torch::nn::Module {
 public:
  /// `intermediate_size` of this rank.
  Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias = Bias::kNo,
      const TensorRegion& region = {});
  /// x [..., hidden] of the stream -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x);
  /// x inside the region, on all ranks the same -> an addend of every rank, not yet summed. No bias
  /// of down_proj where there are several ranks.
  at::Tensor addend(const at::Tensor& x);

 private:
  at::Tensor inner(const at::Tensor& x);

  TensorRegion region_;
  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

}  // namespace tessera::nn
