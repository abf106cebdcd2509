// The checks of a run that [debug] asks for.
//
// debug.check_dtypes: one forward under a DtypeWatch before the first step. debug.check_placements:
// once a step, after its last backward, gradients that their layers declare the same on all ranks
// of an axis are compared bit for bit. Next: found_problems.h.
#pragma once

#include <cstdint>

#include "models/language_model.h"
#include "tessera/shard.h"
#include "train/data/data.h"
#include "train/data/sampler.h"

namespace tessera::train {

/// Runs `rows` of the batch of `step` forward, without gradients, and looks at the dtype of every
/// result. Collective. Errors, on all ranks alike: FoundProblems (kContract) when any rank
/// found one that leaves its unit's; all are listed in the log before.
void check_dtypes(Sharded<models::LanguageModel>& model, const BatchSource& source,
                  std::int64_t step, const RowRange& rows);

/// Collective. Errors, on all ranks alike: FoundProblems (kContract) naming the parameters.
void check_placements(const ShardedBase& model);

}  // namespace tessera::train
