// The operations of control messages, which are small and always relayed (relay.h).
#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Gathers the bytes of every rank, in place and relayed. `bytes` holds them in rank order,
/// lengths[r] bytes of rank r; the caller fills those of its own rank. Every rank knows all
/// lengths. Bytes a rank sends: about (size - 1) / size x the sum of lengths, in ceil(log2 size)
/// messages.
struct RelayedGather {
  at::Tensor bytes;
  std::vector<std::int64_t> lengths;

  const at::Tensor& first_tensor() const { return bytes; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return true; }
  void run_alone() const {}
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const RelayedGather*>& ranks);
  RelayedGather cloned(const MakeTwin& make) const;
  void deliver(const RelayedGather& to) const;
};

/// Combines `values` over ranks, in place, while they are relayed: by the bitwise or of bytes
/// (kAny), or by the sum of integers (kSum). For a sum `values` is int64 [2, n]: the caller fills
/// row 0 with the numbers and row 1 with zeros, and finds the sums in row 0. Bytes a rank sends:
/// ceil(log2 size) x values.
struct Combine {
  enum class Way : std::uint8_t { kAny, kSum };
  at::Tensor values;
  Way way = Way::kAny;

  const at::Tensor& first_tensor() const { return values; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t otherwise) const { return otherwise; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return true; }
  void run_alone() const {}
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const Combine*>& ranks);
  Combine cloned(const MakeTwin& make) const;
  void deliver(const Combine& to) const;
};

}  // namespace tessera::comm
