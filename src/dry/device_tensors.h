// Tensors of the fake device: tensors of the CPU's memory under another device's name.
//
// Numbers of tokens, counts of experts and flags have values, in memory of the host, and an
// operation on them runs on CPU tensors over the same memory. Views of any tensor, also of fake
// ones, are made in this way, since they access no element. Next: fake_device.h, fake_operations.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::dry {

/// Whether a result is a view of an argument, so that no element is accessed.
bool is_view(const c10::FunctionSchema& schema);

bool is_of_fake_device(const at::Tensor& tensor);

/// Whether an argument is a tensor of the fake device, or is that device.
bool names_fake_device(const c10::OperatorHandle& operation, const c10::Stack& stack);

/// Returns a tensor of the fake device over the CPU tensor's memory, which it keeps alive.
at::Tensor under_fake_device(const at::Tensor& of_cpu);

/// Runs an operation of the fake device on CPU tensors over the same memory. Its results are on the
/// fake device.
void run_on_memory(const c10::OperatorHandle& operation, c10::Stack* stack);

}  // namespace tessera::dry
