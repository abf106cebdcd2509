// The float32 values of a bfloat16 shard: its own bits and sixteen more beside it.
//
// Four bytes an element in all, as float32 storage, and the shard is gathered as it is: no cast.
// Next: base/split_float.h for the bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::fsdp {

/// Elements of a shard whose float32 values an optimizer forms at a time. Kernels that divide a
/// tensor by cache lines treat parts of this size as they would the whole: the bits of an update do
/// not depend on it.
inline constexpr std::int64_t kMasterPart = std::int64_t{1} << 20;

/// `values` [n] float32 = shard [n] bfloat16 with remainder [n] int16.
void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values);
/// The inverse: rounds `values` into the shard, halves away from zero, and keeps the rest.
void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder);
/// shard [n] bfloat16 = values [n] float32, rounded as split_master does.
void round_half_away(const at::Tensor& values, const at::Tensor& shard);

}  // namespace tessera::fsdp
