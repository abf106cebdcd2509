#include "comm/ops/device_leases.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace tessera::comm {

std::int64_t longest_part(const AllReduce& op, int ranks) {
  return (op.data.numel() + ranks - 1) / ranks;
}

std::int64_t part_of_rank(const AllReduce& op, int ranks, int rank) {
  const std::int64_t part = longest_part(op, ranks);
  return std::clamp<std::int64_t>(op.data.numel() - rank * part, 0, part);
}

std::vector<DeviceLease> device_leases(const ReduceScatter& op, int /*ranks*/, int /*rank*/) {
  if (op.input.scalar_type() != op.output.scalar_type()) {
    return {{op.input.numel(), op.input.scalar_type()}};
  }
  if (op.into == Into::kAdd) return {{op.output.numel(), op.output.scalar_type()}};
  return {};
}

std::vector<DeviceLease> device_leases(const AllReduce& op, int ranks, int rank) {
  const at::ScalarType wire = op.data.scalar_type(), sum = op.result().scalar_type();
  if (wire == sum) return {};
  if (!in_two_rounds(op, ranks)) return {{op.data.numel() * ranks, wire}};
  return {{part_of_rank(op, ranks, rank) * ranks, wire}, {longest_part(op, ranks) * ranks, sum}};
}

namespace {

/// `addends` holds the addends of all ranks, in rank order.
void sum_of_ranks(const at::Tensor& addends, int ranks, const at::Tensor& result, bool adds) {
  kernels::sum_in_rank_order(addends.view({ranks, result.numel()}).unbind(), result, adds);
}

}  // namespace

void sum_leased(const ReduceScatter& op, const std::vector<at::Tensor>& leased, int ranks) {
  const at::Tensor output = op.output.view(-1);
  const bool adds = op.into == Into::kAdd;
  if (op.input.scalar_type() != op.output.scalar_type()) {
    sum_of_ranks(leased[0], ranks, output, adds);
  } else if (adds) {
    output.add_(leased[0]);
  }
}

void sum_leased(const AllReduce& op, const std::vector<at::Tensor>& leased, int ranks, int rank) {
  if (!in_two_rounds(op, ranks)) {
    return sum_of_ranks(leased[0], ranks, op.result().view(-1), /*adds=*/false);
  }
  const std::int64_t mine = part_of_rank(op, ranks, rank);
  if (mine == 0) return;
  const std::int64_t begin = longest_part(op, ranks) * rank;
  sum_of_ranks(leased[0], ranks, leased[1].narrow(0, begin, mine), /*adds=*/false);
}

void take_gathered(const AllReduce& op, const std::vector<at::Tensor>& leased) {
  const at::Tensor result = op.result().view(-1);
  result.copy_(leased[1].narrow(0, 0, result.numel()));
}

}  // namespace tessera::comm
