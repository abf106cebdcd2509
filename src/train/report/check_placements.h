// debug.check_placements: once a step, after its last backward, gradients that their layers declare
// the same on all ranks of an axis are compared bit for bit.
#pragma once

#include "tessera/shard.h"

namespace tessera::train {

/// Collective. Errors, on all ranks alike: FoundProblems (kContract) naming the parameters.
void check_placements(const ShardedBase& model);

}  // namespace tessera::train
