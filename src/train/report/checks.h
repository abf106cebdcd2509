// The checks of a run that [debug] asks for.
//
// debug.check_dtypes: one forward under a DtypeWatch before the first step. debug.check_placements:
// once a step, after its last backward, gradients that their layers declare the same on all ranks
// of an axis are compared bit for bit.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera {
class ShardedBase;
}

namespace tessera::train {

/// A check that was asked for looked, and found something. Not a refusal of what was asked for and
/// not a failure of the run: the program ends with a code of its own.
class FoundProblems : public Error {
 public:
  using Error::Error;
};

/// Lines that any rank has, each once, in the order of ranks: the same on all of them. Collective.
std::vector<std::string> lines_of_ranks(const ShardedBase& model, const std::string& mine,
                                        const std::string& what);

/// Looks at the dtype of every result while `forward` runs, without gradients. Collective. Errors,
/// on all ranks alike: FoundProblems (kContract) when any rank found one that leaves its unit's;
/// all are listed in the log before.
void check_dtypes(const ShardedBase& model, const std::function<void()>& forward);

/// Collective. Errors, on all ranks alike: FoundProblems (kContract) naming the parameters.
void check_placements(const ShardedBase& model);

}  // namespace tessera::train
