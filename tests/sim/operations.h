// Making, viewing, resizing and copying tensors of a simulated device: what the CPU's kernels
// cannot do for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace tessera::sim {

/// Without values: NaN.
at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      c10::Device device);
/// Contiguous, of that size; more memory where it needs it, with the old values.
void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes);
void resize_storage(const c10::Storage& storage, std::size_t bytes);

/// Gives the boxed kernel (fallback.h) to operations that libtorch would take apart on a device
/// that it does not know, and that are one kernel on a GPU.
void register_single_operations();

}  // namespace tessera::sim
