// Whether code that computes with a tensor is to choose block sizes or an algorithm for a CPU.
// Next: kernels.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// Whether the tensor is on the CPU. A test may make it false there, to take a device's choices:
/// its results are compared bit for bit with those of a device.
bool on_cpu(const at::Tensor& tensor);

}  // namespace tessera::kernels
