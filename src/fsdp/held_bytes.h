// Counts the memory that the units of a sharded model hold at this moment, by what it is for.
#pragma once

#include <cstdint>

#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// Bytes of this rank; each memory counts once.
struct HeldBytes {
  std::int64_t shards = 0;     ///< parameters as they are stored, frozen ones too
  std::int64_t gradients = 0;  ///< sums, and what the optimizer reads
  std::int64_t unsharded = 0;  ///< gathered parameters, but those that are the shards themselves
  std::int64_t pool = 0;       ///< blocks for gathers and reductions, those on hand too
};
HeldBytes held_bytes(const ShardedBase& model);
// Each gives one of these alone, without a look at every parameter.
std::int64_t unsharded_bytes(const ShardedBase& model);
std::int64_t pool_bytes(const ShardedBase& model);

/// The bytes that an optimizer keeps.
struct OptimizerBytes {
  std::int64_t moments = 0;
  std::int64_t masters = 0;  ///< fp32 values beside 16-bit shards
};
OptimizerBytes held_bytes(const Optimizer& optimizer);

}  // namespace tessera::fsdp
