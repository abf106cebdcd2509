// Which units' optimizer state lies outside of memory: what the pass "offload" chooses by. Pure.
//
// What is outside costs its bytes twice an update, from and to a file, and saves memory: all of it
// but two chunks. Greedy: while more has to go, the smallest unit that is enough, else the one that
// brings most. Next: passes.h; fsdp/optim/state_of_units.h.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/agreed/order.h"
#include "fsdp/optim/state_of_units.h"

namespace tessera::capture {

/// Bytes of optimizer state in memory where these units' is outside, buffers included.
std::int64_t state_in_memory(const std::vector<fsdp::StateBytes>& state,
                             const std::vector<fsdp::UnitId>& offloaded);

/// `offloaded` and the least beside it that leaves at most `most_bytes` in memory; where nothing
/// does, what comes nearest. In the order of units.
std::vector<fsdp::UnitId> offloaded_for(const std::vector<fsdp::StateBytes>& state,
                                        std::vector<fsdp::UnitId> offloaded,
                                        std::int64_t most_bytes);

}  // namespace tessera::capture
