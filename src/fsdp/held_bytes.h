// Counts the memory that the units of a sharded model hold at this moment, by purpose.
#pragma once

#include <cstdint>

#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// Bytes of this rank; each memory counts once.
struct HeldBytes {
  std::int64_t shards = 0;     ///< parameters as they are stored, also frozen ones
  std::int64_t gradients = 0;  ///< sums, and the gradients that the optimizer reads
  std::int64_t unsharded = 0;  ///< gathered parameters, except those that are the shards themselves
  std::int64_t pool = 0;       ///< blocks for gathers and reductions, also unused ones
};
HeldBytes held_bytes(const ShardedBase& model);
// These return one of the numbers alone, without a walk over every parameter.
std::int64_t unsharded_bytes(const ShardedBase& model);
std::int64_t pool_bytes(const ShardedBase& model);

/// The bytes of an optimizer's state.
struct OptimizerBytes {
  std::int64_t moments = 0;
  std::int64_t masters = 0;  ///< fp32 values of 16-bit shards
};
OptimizerBytes held_bytes(const Optimizer& optimizer);

}  // namespace tessera::fsdp
