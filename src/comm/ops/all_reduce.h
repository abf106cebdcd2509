#pragma once

#include "comm/ops/operation.h"
#include "layout/range.h"

namespace tessera::comm {

/// The way of the addends, which every rank sends to every other rank: directly, in one round of
/// size - 1 messages, or relayed by other ranks, in ceil(log2 size) rounds of one message
/// (relay.h). Both ways send the same number of bytes.
enum class Route : std::uint8_t { kDirect, kRelayed };

/// Sums `data` over ranks, in rank order, with the same bits on every rank. The sum is formed in
/// place, or in `output`, which has as many elements and the dtype of the sums; then `data` is
/// unchanged. Addends travel in the dtype of `data` and are widened to the result's dtype before
/// they are added. Bytes a rank sends, in a group of H ranks: (H - 1) x data where H is 2 or the
/// addends of all ranks together have at most 256 KiB; else (H - 1) / H x (data + result). In the
/// second case sums travel in the result's dtype, since rounding them for the wire would be one
/// rounding more than in a reduce-scatter.
struct AllReduce {
  at::Tensor data;
  at::Tensor output = {};        ///< undefined: in place
  Route route = Route::kDirect;  ///< kRelayed is ignored where in_two_rounds()
  const at::Tensor& result() const { return output.defined() ? output : data; }

  const at::Tensor& first_tensor() const { return data; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int ranks) const;
  void run_alone() const;
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const AllReduce*>& ranks);
  AllReduce cloned(const MakeTwin& make) const;
  void deliver(const AllReduce& to) const;
};

/// Whether each rank sums one part and sends the sum to all others, in a second round. Otherwise
/// every rank sends all of its data to every other rank.
bool in_two_rounds(const AllReduce& op, int ranks);
/// The part that `rank` sums in an all-reduce of two rounds. Parts differ by one element at most.
layout::Range summed_by(const AllReduce& op, int ranks, int rank);

}  // namespace tessera::comm
