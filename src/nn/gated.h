// What experts do between their products, on both halves of one product at once.
//
// mlp.h and geglu.h have gates whose two inputs are products of their own. Short symbols: I inner.
// Next: ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// both [..., 2I], gate then up -> silu(gate) * up [..., I].
at::Tensor swiglu_halves(const at::Tensor& both);

struct ClampedSwiglu {
  double alpha = 1.702;
  double limit = 7.0;
};

/// gpt-oss: both [..., 2I], gate in the even columns, up in the odd ones ->
/// (up + 1) * gate * sigmoid(alpha * gate) [..., I] with gate at most `limit` and up within
/// +-limit; what is clamped gets no gradient. 16-bit input: fp32 inside, rounded once.
at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options);

}  // namespace tessera::nn
