// Pinned host memory: copies to and from it overlap with the host, so it can be made unreadable
// while one is on its way.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace tessera::sim {

/// A block has pages of its own, filled with NaN. Threads: any.
c10::Allocator& pinned_memory();
bool is_pinned(const void* pointer);

/// Makes the whole pages that only the tensor uses unreadable, or readable again; does nothing
/// where the tensor is not pinned. Threads: the holder of the simulator's mutex.
void forbid(const at::Tensor& tensor, bool unreadable);

}  // namespace tessera::sim
