#include "comm/sum.h"

#include "kernels/cpu/sum.h"

namespace tessera::comm {

void sum_in_rank_order(const std::vector<const void*>& addends, at::ScalarType from,
                       const SumInto& result) {
  kernels::cpu::sum_host_memory(
      addends, from, {result.data, result.dtype, result.numel, result.into == Into::kAdd});
}

}  // namespace tessera::comm
