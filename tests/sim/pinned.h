// Pinned host memory: copies to and from it overlap with the host, so it can be made unreadable
// while one is on its way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace tessera::sim {

/// A block has pages of its own, filled with NaN. Threads: any.
c10::Allocator& pinned_memory();
bool is_pinned(const void* pointer);

/// The whole pages that are the tensor's alone, unreadable or readable again; nothing where the
/// tensor is not pinned. Threads: whoever holds the simulator's mutex.
void forbid(const at::Tensor& tensor, bool unreadable);

}  // namespace tessera::sim
