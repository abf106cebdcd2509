// What a collective takes of a device beside its tensors, where NCCL's own sum would have other bits
// (backends/nccl), and so what a dry run counts of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/ops/all_reduce.h"
#include "comm/ops/reduce_scatter.h"

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
/// Others take nothing.
template <class Op>
std::vector<DeviceLease> device_leases(const Op& /*op*/, int /*ranks*/, int /*rank*/) {
  return {};
}

/// What is launched once the peers' addends are there, in the blocks of device_leases(): the sums, in
/// rank order.
void sum_leased(const ReduceScatter& op, const std::vector<at::Tensor>& leased, int ranks);
/// In two rounds: of this rank's part. All parts are to be gathered behind it, and then taken.
void sum_leased(const AllReduce& op, const std::vector<at::Tensor>& leased, int ranks, int rank);
void take_gathered(const AllReduce& op, const std::vector<at::Tensor>& leased);

/// Of an AllReduce in two rounds each rank sums a part, all of one length but the last ones: how many
/// elements a rank's has, and the longest.
std::int64_t longest_part(const AllReduce& op, int ranks);
std::int64_t part_of_rank(const AllReduce& op, int ranks, int rank);

}  // namespace tessera::comm
