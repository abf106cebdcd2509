// Any operation on a simulated device: the CPU's kernel over the same memory, noted on the stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera::sim {

/// The boxed kernel.
void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

/// The same bytes as a tensor of the CPU.
at::Tensor as_cpu(const at::Tensor& tensor);

/// "add.out": the operation's name without its namespace.
std::string short_name(const c10::OperatorHandle& operation);

}  // namespace tessera::sim
