// What one rank sends for a collective, worked out by its op (ops/operation.h).
//
// As sends and receives between pairs of ranks: these hold what they have posted against
// sent_bytes() (backends/gloo/exchange.h); traces and tests ask the same function. The in-process
// backend moves nothing: there it is what the same ranks would send over Gloo. NCCL has its own
// ways. Next: ../../docs/communication.md.
#pragma once

#include <cstdint>

#include "comm/group.h"

namespace tessera::comm {

/// Whether it travels over other ranks (relay.h).
bool is_relayed(const Op& op, int ranks);
/// By `rank` of `ranks`, to all others together.
std::int64_t sent_bytes(const Op& op, int ranks, int rank);
std::int64_t sent_bytes(const Batch& batch, int ranks, int rank);

}  // namespace tessera::comm
