// Blocks of device memory that a collective takes beside its tensors where NCCL's own sum would have
// other bits (backends/nccl), which a dry run counts. An operation without an answer here does not
// compile there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/ops/all_gather.h"
#include "comm/ops/all_reduce.h"
#include "comm/ops/all_to_all.h"
#include "comm/ops/broadcast.h"
#include "comm/ops/reduce_scatter.h"
#include "comm/ops/relayed.h"

namespace tessera::comm {

/// One block, from the group's pool until the op has ended.
struct DeviceLease {
  std::int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

/// On a rank (the second number) of so many. A sum in a wider dtype: what all ranks send. Of the same
/// dtype: the sum, where it is to be added.
std::vector<DeviceLease> device_leases(const ReduceScatter& op, int ranks, int rank);
/// A sum in a wider dtype, in one round: what all ranks send. In two: what they send of this rank's
/// part, and all parts' sums.
std::vector<DeviceLease> device_leases(const AllReduce& op, int ranks, int rank);
inline std::vector<DeviceLease> device_leases(const AllGather&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const AllToAll&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const Broadcast&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const RelayedGather&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const Combine&, int, int) { return {}; }

/// Launches the sums once the peers' addends are there, in the blocks of device_leases(), in
/// rank order.
void sum_leased(const ReduceScatter& op, const std::vector<at::Tensor>& leased, int ranks);
/// In two rounds: of this rank's part. All parts are to be gathered behind it, and then taken.
void sum_leased(const AllReduce& op, const std::vector<at::Tensor>& leased, int ranks, int rank);
void take_gathered(const AllReduce& op, const std::vector<at::Tensor>& leased);

/// In two rounds each rank sums a part: how many elements the longest has, and a rank's own. All but the
/// last ones have one length, as NCCL's gather of the sums wants (summed_by() spreads the rest evenly).
std::int64_t longest_part(const AllReduce& op, int ranks);
std::int64_t part_of_rank(const AllReduce& op, int ranks, int rank);

}  // namespace tessera::comm
