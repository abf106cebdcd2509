#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// Sums slice r of every rank's input into the output of rank r, in rank order. `input`
/// [size x slice] has the wire dtype, `output` [slice] the accumulation dtype: every addend is
/// widened to that dtype before it is added. `into` says whether the sum overwrites the output or
/// is added to it. `input` is unchanged. The caller accesses neither tensor before wait() has
/// returned. Bytes a rank sends: size - 1 slices.
struct ReduceScatter {
  at::Tensor input;
  at::Tensor output;
  Into into = Into::kOverwrite;
  std::uint32_t bucket = 0;  ///< index within the unit, for traces

  const at::Tensor& first_tensor() const { return input; }
  OpFacts facts() const;
  std::uint32_t bucket_or(std::uint32_t) const { return bucket; }
  void check(const CheckedBatch& batch) const;
  std::int64_t sent_bytes(int ranks, int rank) const;
  bool is_relayed(int) const { return false; }
  void run_alone() const;
  std::unique_ptr<Steps> steps(int ranks, int rank) const;
  static void run_on_devices(const std::vector<const ReduceScatter*>& ranks);
  ReduceScatter cloned(const MakeTwin& make) const;
  void deliver(const ReduceScatter& to) const;
};

}  // namespace tessera::comm
