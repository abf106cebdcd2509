// The dtype in which a layer computes what its activations' dtype is too narrow for.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// fp32, or fp64 for fp64.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return at::promote_types(dtype, at::kFloat);
}
inline at::ScalarType wide_dtype(const at::Tensor& x) { return wide_dtype(x.scalar_type()); }

}  // namespace tessera::nn
