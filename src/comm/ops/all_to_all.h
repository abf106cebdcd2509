#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Every rank sends a different range of its input to each rank. `input` holds these ranges in the
/// order of the receiving ranks, sends[r] elements for rank r. `output` receives ranges in the
/// order of the sending ranks, receives[r] elements from rank r. receives[s] on rank r equals
/// sends[r] on rank s: the ranks exchange these counts beforehand. Bytes a rank sends: all of
/// `input` but the range for itself.
struct AllToAll {
  at::Tensor input;
  std::vector<std::int64_t> sends;
  at::Tensor output;
  std::vector<std::int64_t> receives;

  const at::Tensor& first_tensor() const { return input; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return false; }
  void run_alone() const;
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const AllToAll*>& ranks);
  AllToAll cloned(const MakeTwin& make) const;
  void deliver(const AllToAll& to) const;
};

}  // namespace tessera::comm
