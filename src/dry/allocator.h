// An allocator in the place of libtorch's for the CPU: it can give fake memory, and it counts.
//
// Fake memory is addresses that nothing stands behind. A fake tensor is a tensor of the CPU with sizes,
// strides, a storage and an address of its own, and no bytes: code that compares addresses, slices a
// bucket or hands a block back to a pool works as on any tensor, and code that reads or writes an
// element crashes at once. The addresses are none that a process has, so that a model of terabytes
// takes nothing of any limit. Next: fake_operations.h, memory_count.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::dry {

/// Puts it in the place of libtorch's own, which it asks for real memory. Once a process; again:
/// nothing happens. Threads: any.
void install_allocator();

/// Whether the tensor's memory is fake; no for undefined tensors and for released ones.
bool is_fake(const at::Tensor& tensor);

/// While alive, memory that libtorch takes for this thread's CPU tensors is fake, unless `is_fake` is
/// false. Needs install_allocator().
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
