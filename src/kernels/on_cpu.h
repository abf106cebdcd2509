// Whether what computes with a tensor is chosen for a CPU, for layers that choose block sizes or an
// algorithm themselves. Next: kernels.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// A tensor on the CPU; but a test's run there may take a device's choices, with which a run on a
/// device is compared bit for bit.
bool on_cpu(const at::Tensor& tensor);

}  // namespace tessera::kernels
