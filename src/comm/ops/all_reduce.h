#pragma once

#include "comm/ops/operation.h"
#include "layout/range.h"

namespace tessera::comm {

/// How what everyone sends to everyone travels: straight, in one round of size - 1 messages, or
/// over other ranks, in ceil(log2 size) rounds of one message (relay.h). The bytes are the same.
enum class Route : std::uint8_t { kDirect, kRelayed };

/// Sum over ranks of `data`, in rank order, the same bits on every rank: in place, or into `output`
/// (as many elements, the dtype in which sums are formed; `data` is left as it was). Every addend
/// is widened to the result's dtype before it is added, so addends travel in `data`'s dtype. Bytes
/// a rank sends, for size H: (H - 1) x data for H = 2 or up to 256 KiB in all; else (H - 1) / H x
/// (data + result), since sums travel as they are: rounding them again would be one rounding more
/// than a reduce-scatter has.
struct AllReduce {
  at::Tensor data;
  at::Tensor output = {};        ///< undefined: in place
  Route route = Route::kDirect;  ///< up to 256 KiB in all; what is larger goes straight
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

/// Whether each rank sums a stretch and sends it round; else everyone sends everything to everyone.
bool in_two_rounds(const AllReduce& op, int ranks);
/// What `rank` sums of an all-reduced tensor that travels in two rounds: parts as equal as can be.
layout::Range summed_by(const AllReduce& op, int ranks, int rank);

}  // namespace tessera::comm
