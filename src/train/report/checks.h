// The checks of a run that [debug] asks for.
//
// debug.check_dtypes: one forward under a DtypeWatch before the first step. debug.check_placements:
// once a step, after its last backward, gradients that their layers declare the same on all ranks
// of an axis are compared bit for bit.
#pragma once

#include <cstdint>

#include "tessera/error.h"
#include "train/data/sampler.h"

namespace tessera {
template <class M>
class Sharded;
class ShardedBase;
}  // namespace tessera

namespace tessera::models {
class LanguageModel;
}

namespace tessera::train {

class BatchSource;

/// A check that was asked for looked, and found something. Not a refusal of what was asked for and
/// not a failure of the run: the program ends with a code of its own.
class FoundProblems : public Error {
 public:
  using Error::Error;
};

/// Runs `rows` of the batch of `step` forward, without gradients, and looks at the dtype of every
/// result. Collective. Errors, on all ranks alike: FoundProblems (kContract) when any rank
/// found one that leaves its unit's; all are listed in the log before.
void check_dtypes(Sharded<models::LanguageModel>& model, const BatchSource& source,
                  std::int64_t step, const RowRange& rows);

/// Collective. Errors, on all ranks alike: FoundProblems (kContract) naming the parameters.
void check_placements(const ShardedBase& model);

}  // namespace tessera::train
