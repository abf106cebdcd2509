#include "comm/ops/operation.h"

#include "tessera/error.h"

namespace tessera::comm {

std::string_view to_string(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kAnyOf:
      return "any_of";
    case Kind::kSumOf:
      return "sum_of";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kBarrier:
      return "barrier";
    case Kind::kBatch:
      return "batch";
  }
  return "unknown";
}

void CheckedBatch::require_usable(const at::Tensor& tensor) const {
  TESSERA_INVARIANT(tensor.defined() && tensor.is_contiguous(), "batch of ", unit,
                    ": found a tensor that is undefined or not contiguous");
  const at::Device there = tensor.device();
  TESSERA_INVARIANT(there.type() == device.type() && (there.is_cpu() || there == device),
                    "batch of ", unit, ": found a tensor on ", there, ", expected ", device);
}

}  // namespace tessera::comm
