// An allocator that replaces libtorch's for the CPU: it can return fake memory, and it counts.
//
// Fake memory is addresses without memory. A fake tensor is a CPU tensor with sizes, strides, a
// storage and a unique address, and no bytes: code that compares addresses, slices a bucket or
// returns a block to a pool works as on any tensor, and code that reads or writes an element
// crashes at once. No process has these addresses, so that a model of terabytes counts against no
// limit. Next: fake_operations.h, memory_count.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::dry {

/// Installs it in place of libtorch's own, which it asks for real memory. Does nothing the second
/// time. Threads: any.
void install_allocator();

/// Whether the tensor's memory is fake; false for undefined tensors and for released ones.
bool is_fake(const at::Tensor& tensor);

/// While alive, memory that libtorch takes for this thread's CPU tensors is fake, unless `is_fake`
/// is false. Needs install_allocator().
class FakeMemoryScope {
 public:
  explicit FakeMemoryScope(bool is_fake = true);
  ~FakeMemoryScope();
  FakeMemoryScope(const FakeMemoryScope&) = delete;
  FakeMemoryScope& operator=(const FakeMemoryScope&) = delete;

 private:
  bool outer_;
};

}  // namespace tessera::dry
