// keep(): marks a result that a selective checkpoint keeps instead of recomputing. Next:
// recompute.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace tessera {

/// Returns compute(), a tensor of shape `sizes`. A selective checkpoint around the call keeps the
/// result, and its second run returns that instead of calling `compute` again. The call has no
/// gradient: make it in the forward of a torch::autograd::Function whose backward covers it.
/// Errors: kUsage under grad mode, and where the second run asks for other results than the first.
at::Tensor keep(at::IntArrayRef sizes, c10::function_ref<at::Tensor()> compute);

}  // namespace tessera
