// debug.guard: ranks compare what must have the same bits on all of them.
//
// After an update each rank hashes its elements of parameters, their gradients, what the optimizer
// keeps of them, buffers, the step's tokens and the state of the random numbers, and compares with
// the ranks that hold the same: over dp_replicate, over dp_shard, cp and tp what is whole on each,
// over cp, tp and pp the tokens, over cp and tp the random state, over pp the copies of a tied
// embedding. Bytes
// that a rank sends for each axis: 16 for each tensor and other rank. A bucket whose parts are
// unequal over tp begins its parameters elsewhere on each rank: those are left out. Next: checks.h.
#pragma once

#include <cstdint>
#include <vector>

#include "train/data/data.h"

namespace tessera {
class Optimizer;
class ShardedBase;
}  // namespace tessera

namespace tessera::train {

/// Between the update of a step and zero_grad(); `rows`: those that this rank has read for it,
/// which are read again. Collective. Errors, on all ranks alike: FoundProblems (kContract) naming
/// what differs, the axis, the ranks and the step.
void compare_replicas(const ShardedBase& model, const Optimizer& optimizer, const BatchSource& data,
                      const std::vector<RowRange>& rows, std::int64_t step);

}  // namespace tessera::train
