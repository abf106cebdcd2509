// RMSNorm as Hugging Face's models compute it: the norm in fp32, rounded to the input's dtype, times the
// weight, returned in the input's dtype.
//
// A weight that is wider than the input (fp32 norms beside bf16 activations) multiplies in its own dtype
// before the one cast back. Next: rope.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace tessera::nn {

/// x [..., K], weight [K] -> [..., K] in x's dtype.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// The same out of ATen operations: any device and floating dtype; what the CPU kernel is tested with.
at::Tensor rms_norm_composite(const at::Tensor& x, const at::Tensor& weight, double eps);

class RmsNorm : public torch::nn::Module {
 public:
  RmsNorm(std::int64_t size, double eps);
  at::Tensor forward(const at::Tensor& x);
  double eps() const { return eps_; }

  at::Tensor weight;  ///< [size]

 private:
  double eps_;
};

}  // namespace tessera::nn
