// base/first_derivative.h under the name that the layers use, and what has further ones.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/first_derivative.h"

namespace tessera::nn {

using base::refuse_double_backward;

/// In fp64, which derivatives are checked in, layers call their kernels without a node of their own
/// around them: those are ATen operations there, whose graph autograd keeps and differentiates as
/// often as it is asked to. It costs memory, for which the other dtypes have our nodes.
inline bool has_second_derivatives(const at::Tensor& x) { return x.scalar_type() == at::kDouble; }

}  // namespace tessera::nn
