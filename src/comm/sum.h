// The one place where what a wire has brought of several ranks is added, in this process's memory.
//
// Left to right in rank order, each addend widened to the result's dtype first: every backend calls
// this, so that results have the same bits whatever carried the data. The loop, and the same sum of
// tensors on any device, are kernels' (kernels.h).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/group.h"
#include "kernels/kernels.h"

namespace tessera::comm {

using kernels::can_sum;

struct SumInto {
  void* data = nullptr;
  at::ScalarType dtype = at::ScalarType::Float;
  std::int64_t numel = 0;
  Into into = Into::kOverwrite;
};

/// result = a0 + a1 + ..., or result = result + (a0 + a1 + ...). `addends` holds at least one
/// pointer to result.numel values of dtype `from`, in rank order; one of them may be result.data
/// itself (kOverwrite).
inline void sum_in_rank_order(const std::vector<const void*>& addends, at::ScalarType from,
                              const SumInto& result) {
  kernels::sum_host_memory(addends, from,
                           {result.data, result.dtype, result.numel, result.into == Into::kAdd});
}

}  // namespace tessera::comm
