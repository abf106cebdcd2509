// The operations of control messages: small, and always relayed (../relay.h).
#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// For small messages: everyone's bytes to everyone, relayed. `bytes` holds them in rank order,
/// rank r's lengths[r] long; the own ones are filled by the caller. Every rank knows all lengths.
/// Bytes a rank sends: about sum of lengths x (size - 1) / size, in ceil(log2 size) messages.
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

/// In place, over ranks, combined on the way: bitwise or of bytes, or the sum of whole numbers
/// (int64 [2, n]: the numbers, then as many zeros; the sums come out in the first row). Bytes a
/// rank sends: ceil(log2 size) x values.
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
