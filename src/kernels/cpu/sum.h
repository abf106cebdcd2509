// Sums over ranks of what lies in this process's own memory, tensor or not: what a wire brought.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera::kernels::cpu {

struct HostSum {
  void* data = nullptr;
  at::ScalarType dtype = at::ScalarType::Float;
  std::int64_t numel = 0;
  bool adds = false;
};

/// sum_in_rank_order of the list (kernels.h) in one pass over all addends, without a temporary.
/// `addends` holds at least one pointer to result.numel values of dtype `from`.
void sum_host_memory(const std::vector<const void*>& addends, at::ScalarType from,
                     const HostSum& result);

}  // namespace tessera::kernels::cpu
