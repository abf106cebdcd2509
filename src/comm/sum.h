// The one place where values of several ranks are added.
//
// Left to right in rank order, each addend widened to the result's dtype first: every backend calls
// this, so that results have the same bits whatever carried the data. One pass over all addends, no
// temporary.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/group.h"

namespace tessera::comm {

/// Whether values of `from` can be added in `to`: the same dtype (bool excepted), or a wider one of
/// its kind.
bool can_sum(at::ScalarType from, at::ScalarType to);

struct SumInto {
  void* data = nullptr;
  at::ScalarType dtype = at::ScalarType::Float;
  std::int64_t numel = 0;
  Into into = Into::kOverwrite;
};

/// result = a0 + a1 + ..., or result = result + (a0 + a1 + ...). `addends` holds at least one
/// pointer to result.numel values of dtype `from`, in rank order; one of them may be result.data
/// itself (kOverwrite).
void sum_in_rank_order(const std::vector<const void*>& addends, at::ScalarType from,
                       const SumInto& result);

}  // namespace tessera::comm
