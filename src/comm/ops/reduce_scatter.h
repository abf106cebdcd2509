#pragma once

#include "comm/ops/operation.h"

namespace tessera::comm {

/// `input` [size x slice] in the wire dtype, `output` [slice] in the accumulation dtype:
/// output (=, +=) sum over ranks, in rank order, of their input's slice of this rank; every addend
/// is widened to the output's dtype before it is added. `input` is left as it was; neither may be
/// accessed before wait() returned. Bytes a rank sends: (size - 1) x slice bytes.
struct ReduceScatter {
  at::Tensor input;
  at::Tensor output;
  Into into = Into::kOverwrite;
  std::uint32_t bucket = 0;  ///< of its unit, for traces

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
