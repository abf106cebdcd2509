// Compares a small run of a layout with the same one on one rank: what is wrong, where it begins,
// and over which axis.
//
// Transitions are compared with what they are for; then, against one rank, the results of units in
// the order of forward, the gradients at their borders in the order of backward, gradients of
// parameters, and the numbers of a step. A finding names the first place: what follows from it
// alone is left out. Where several axes have several ranks, each is run alone, so that the axis is
// named. Next: small_run.h, ../../check/seen_transitions.h.
#pragma once

#include <cstdint>
#include <vector>

#include "check/finding.h"
#include "train/small/small_run.h"

namespace tessera::train {

/// `found` of a layout, `expected` of one rank.
std::vector<check::Finding> differences(const SmallRun& run, const SeenRun& found,
                                        const SeenRun& expected);

struct SmallComparison {
  std::vector<check::Finding> findings = {};
  std::int64_t gradients =
      0;  ///< parameters whose gradients were compared; 0 for a layout of one rank
};
/// Runs the layout and one rank; where something is wrong each axis alone, too.
SmallComparison compare_in_small(const SmallRun& run);

}  // namespace tessera::train
