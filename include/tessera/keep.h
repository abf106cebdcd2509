// keep(): what a selective checkpoint around a layer hands out again instead of computing it anew.
//
// Next: recompute.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace tessera {

/// compute(), of those sizes. A selective checkpoint around it keeps the result, and hands it out
/// instead of computing it again. No gradient goes through it: call it in the forward of a
/// torch::autograd::Function that has a backward for what it computes.
/// Errors: kUsage under grad mode, or where the second run asks for other results than the first.
at::Tensor keep(at::IntArrayRef sizes, c10::function_ref<at::Tensor()> compute);

}  // namespace tessera
