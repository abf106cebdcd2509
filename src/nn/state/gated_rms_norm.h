// RMS norms with a gate, as layers with a state have them before their last product.
//
// Qwen3-Next normalizes and multiplies by silu of the gate; Mamba-2 multiplies first and normalizes
// groups of channels. Everything is fp32 inside (fp64 of fp64). The normalized value is rounded to
// x's dtype before the weight multiplies it, as transformers' Qwen3-Next does (its Nemotron-H stays
// in fp32 here), and the result once more; the weight and the gate's silu are not
// rounded. Next: ../rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "nn/parameter.h"

namespace tessera::nn {

/// The weight of such a norm, for a layer to register.
class GatedNorm : public PlacedModule {
 public:
  GatedNorm(std::int64_t size, ParameterLayout layout)
      : weight(add_parameter("weight", {size}, norm_weight(std::move(layout)))) {}
  at::Tensor weight;  ///< [size]
};

/// x and z [..., V], weight [V] -> norm(x) * weight * silu(z) in x's dtype. The raw gradient of the
/// weight is fp32. Keeps x and z. Errors: kUsage for a second derivative.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                          double eps);

/// x and z [..., C], weight [C] -> the norm of each of `groups` groups of channels of x * silu(z),
/// times weight, in x's dtype. Gradients as above.
at::Tensor gated_group_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                            std::int64_t groups, double eps);

}  // namespace tessera::nn
