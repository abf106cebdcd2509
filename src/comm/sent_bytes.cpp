#include "comm/sent_bytes.h"

#include <algorithm>
#include <numeric>

#include "comm/relay.h"
#include "comm/tensor_bytes.h"
#include "layout/bucket_plan.h"

namespace tessera::comm {
namespace {

// Up to here everyone sends everything to everyone: one round instead of two.
constexpr std::int64_t kOneRoundBytes = 256 * 1024;

std::int64_t element_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(tensor.element_size());
}

struct SentBytes {
  int ranks;
  int rank;

  std::int64_t operator()(const AllGather& op) const {
    return layout::sent_bytes(nbytes(op.buffer), ranks);
  }
  std::int64_t operator()(const ReduceScatter& op) const {
    return layout::sent_bytes(nbytes(op.input), ranks);
  }
  std::int64_t operator()(const AllReduce& op) const {
    if (!in_two_rounds(op, ranks)) return (ranks - 1) * nbytes(op.data);
    const std::int64_t mine = summed_by(op, ranks, rank).numel();
    return (op.data.numel() - mine) * element_bytes(op.data) +
           (ranks - 1) * mine * element_bytes(op.result());
  }
  std::int64_t operator()(const AllToAll& op) const {
    const std::int64_t all = std::accumulate(op.sends.begin(), op.sends.end(), std::int64_t{0});
    return (all - op.sends[static_cast<std::size_t>(rank)]) * element_bytes(op.input);
  }
  std::int64_t operator()(const RelayedGather& op) const {
    return relay::gathered_bytes_sent(op.lengths, rank);
  }
  std::int64_t operator()(const Combine& op) const {
    return relay::rounds(ranks) * nbytes(op.values);
  }
};

}  // namespace

bool in_two_rounds(const AllReduce& op, int ranks) {
  return ranks > 2 && nbytes(op.data) * ranks > kOneRoundBytes;
}

bool is_relayed(const Op& op, int ranks) {
  const auto* sum = std::get_if<AllReduce>(&op);
  if (sum != nullptr) return sum->route == Route::kRelayed && !in_two_rounds(*sum, ranks);
  return std::holds_alternative<RelayedGather>(op) || std::holds_alternative<Combine>(op);
}

Stretch summed_by(const AllReduce& op, int ranks, int rank) {
  const std::int64_t each = op.data.numel() / ranks;
  const std::int64_t more = op.data.numel() % ranks;
  const std::int64_t begin = each * rank + std::min<std::int64_t>(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

std::int64_t sent_bytes(const Op& op, int ranks, int rank) {
  return std::visit(SentBytes{ranks, rank}, op);
}

std::int64_t sent_bytes(const Batch& batch, int ranks, int rank) {
  std::int64_t bytes = 0;
  for (const Op& op : batch.ops) bytes += sent_bytes(op, ranks, rank);
  return bytes;
}

}  // namespace tessera::comm
