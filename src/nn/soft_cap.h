// Soft-capped logits: cap * tanh(z / cap), which never leaves (-cap, cap).
//
// Next: loss.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// z [...] -> the same shape and dtype. Backward needs the result only; z is let go.
at::Tensor soft_cap(const at::Tensor& z, double cap);

}  // namespace tessera::nn
