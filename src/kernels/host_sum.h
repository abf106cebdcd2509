// The sum in rank order of memory that is no tensor: what a wire brought lies in buffers of its own.
//
// Beside the list (kernels.h), whose functions take tensors and numbers alone: it knows neither
// devices nor dispatch, and is its sum_in_rank_order on the host, in one pass over all addends and
// without a temporary. Defined in cpu/optimizer.cpp.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera::kernels {

/// Where it is added up.
struct HostSum {
  void* data = nullptr;
  at::ScalarType dtype = at::ScalarType::Float;
  std::int64_t numel = 0;
  bool adds = false;
};

/// `addends` holds at least one pointer to result.numel values of dtype `from`. Writes: what
/// result.data points to.
void sum_host_memory(const std::vector<const void*>& addends, at::ScalarType from,
                     const HostSum& result);

}  // namespace tessera::kernels
