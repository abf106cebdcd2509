// The sum in rank order of memory that is no tensor: received data is in buffers of the transport.
//
// It is not in the list (kernels.h), whose functions take only tensors and numbers: it knows
// neither devices nor dispatch. It is sum_in_rank_order on the host, in one pass over all addends
// and without a temporary. Defined in cpu/optimizer.cpp.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera::kernels {

/// The memory of the result.
struct HostSum {
  void* data = nullptr;
  at::ScalarType dtype = at::ScalarType::Float;
  std::int64_t numel = 0;
  bool adds = false;
};

/// `addends` holds at least one pointer to result.numel values of dtype `from`. Writes: the memory
/// at result.data.
void sum_host_memory(const std::vector<const void*>& addends, at::ScalarType from,
                     const HostSum& result);

}  // namespace tessera::kernels
