#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Every rank sends a stretch of its own to every rank. `input` holds them in rank order, sends[r]
/// elements for rank r; `output` takes them in rank order, receives[r] elements from rank r. What r
/// expects of s is what s sends to r: both know it beforehand (counts travel in another exchange).
/// Bytes a rank sends: all of `input` but its own stretch.
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
