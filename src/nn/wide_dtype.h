// The dtype for computations for which the activations' dtype is too narrow.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// fp32, or fp64 for fp64.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return at::promote_types(dtype, at::kFloat);
}
inline at::ScalarType wide_dtype(const at::Tensor& x) { return wide_dtype(x.scalar_type()); }

}  // namespace tessera::nn
