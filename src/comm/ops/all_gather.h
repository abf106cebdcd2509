#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Gathers one slice from every rank, in place. `buffer` is contiguous and holds size() slices;
/// rank r's slice begins at element r x slice. The caller fills the slice of its own rank. Bytes a
/// rank sends: (size - 1) slices.
struct AllGather {
  at::Tensor buffer;
  std::uint32_t bucket = 0;  ///< index within the unit, for traces

  const at::Tensor& first_tensor() const { return buffer; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t) const { return bucket; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return false; }
  void run_alone() const {}
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const AllGather*>& ranks);
  AllGather cloned(const MakeTwin& make) const;
  void deliver(const AllGather& to) const;
};

}  // namespace tessera::comm
