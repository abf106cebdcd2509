#include "train/report/check_placements.h"

#include "base/joined.h"
#include "tessera/clip.h"
#include "train/report/found_problems.h"

namespace tessera::train {

void check_placements(const ShardedBase& model) {
  const auto names = check_invariant_gradients(model);
  if (names.empty()) return;
  throw FoundProblems(
      ErrorKind::kContract,
      concat(
          "debug.check_placements: found gradients that differ between ranks of an axis on which "
          "their layers declare them Invariant: ",
          joined(names),
          "; expected the same bits on every rank: a layer sums too little, "
          "or too much, and the ranks' copies of these parameters drift apart"));
}

}  // namespace tessera::train
