// Redistribution: which rank sends which elements of a parameter to which other one when its layout
// changes.
//
// Pure. Between two layouts of one run (fsdp/relayout.h); reading a checkpoint elsewhere is the
// same question to files instead of ranks, answered piece by piece in io/checkpoint_folder.h.
#pragma once

#include <vector>

#include "layout/bucket_plan.h"

namespace tessera::layout {

/// Elements of one parameter that rank `to` takes from rank `from`, which may be itself.
struct Move {
  Range range;
  int from = 0;
  int to = 0;
  bool operator==(const Move&) const = default;
};

/// before[r] and after[r]: the elements that rank r holds; they may overlap (replicated parameters)
/// and be empty. What a rank holds already it takes from itself, the rest from the lowest rank that
/// has it. In the order of `to`, then of elements. Errors: kInternal for elements that are wanted
/// and nobody holds.
std::vector<Move> plan_moves(const std::vector<Range>& before, const std::vector<Range>& after);

}  // namespace tessera::layout
