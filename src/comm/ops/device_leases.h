// Device leases: blocks of device memory that a collective needs in addition to its tensors.
//
// The NCCL backend takes them where NCCL's own sum would have different bits (backends/nccl); a dry
// run counts them. Both call device_leases() for every operation, so an operation without an
// overload below does not compile.
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

/// One block of the group's pool, which the op holds until it ends.
struct DeviceLease {
  std::int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
};

/// The blocks that `rank` of `ranks` ranks needs. Where the output's dtype is wider than the
/// input's: one block for the addends of all ranks. Where both dtypes are the same and the op adds
/// to the output: one block for the sum. Otherwise none.
std::vector<DeviceLease> device_leases(const ReduceScatter& op, int ranks, int rank);
/// Needs blocks only where the result's dtype is wider. In one round: one block for the addends of
/// all ranks. In two rounds: one block for all ranks' addends of the part that this rank sums, and
/// one for the sums of all parts.
std::vector<DeviceLease> device_leases(const AllReduce& op, int ranks, int rank);
inline std::vector<DeviceLease> device_leases(const AllGather&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const AllToAll&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const Broadcast&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const RelayedGather&, int, int) { return {}; }
inline std::vector<DeviceLease> device_leases(const Combine&, int, int) { return {}; }

/// Launches the sums, in rank order. `leased` are the blocks of device_leases(), which hold by then
/// the addends of all ranks, or for a reduce-scatter in one dtype their sum.
void sum_leased(const ReduceScatter& op, const std::vector<at::Tensor>& leased, int ranks);
/// In an all-reduce of two rounds, sums this rank's part only. The caller then gathers all parts
/// and calls take_gathered().
void sum_leased(const AllReduce& op, const std::vector<at::Tensor>& leased, int ranks, int rank);
/// Copies the gathered sums of all parts into the result.
void take_gathered(const AllReduce& op, const std::vector<at::Tensor>& leased);

/// The number of elements of the longest part in an all-reduce of two rounds, where each rank sums
/// one part. Only the last parts may be shorter, because NCCL gathers parts of one length;
/// summed_by(), for other backends, spreads the remainder evenly.
std::int64_t longest_part(const AllReduce& op, int ranks);
/// The number of elements of the part that `rank` sums. Only the last parts are shorter than
/// longest_part().
std::int64_t part_of_rank(const AllReduce& op, int ranks, int rank);

}  // namespace tessera::comm
