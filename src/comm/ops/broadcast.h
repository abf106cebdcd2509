#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Copies `data` of the rank `source` to every rank, in place. Bytes a rank sends: (size - 1) x
/// data from the source, none from the others.
struct Broadcast {
  at::Tensor data;
  int source = 0;  ///< index within the group

  const at::Tensor& first_tensor() const { return data; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return false; }
  void run_alone() const {}
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const Broadcast*>& ranks);
  Broadcast cloned(const MakeTwin& make) const;
  void deliver(const Broadcast& to) const;
};

}  // namespace tessera::comm
