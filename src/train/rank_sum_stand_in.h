// RankSumStandIn: in the place of sum_over_ranks (step.h), the one sum over ranks that is no
// transition and no gradient's.
//
// As parallel::TransitionStandIn: tests put in the faults that they have to find. The trainer has
// none. Private to train/.
#pragma once

#include <vector>

#include "train/step.h"

namespace tessera::train {

class RankSumStandIn {
 public:
  virtual ~RankSumStandIn() = default;
  /// The sum on this rank, `what` it is of, and every rank's values, by rank.
  virtual std::vector<double> sum(RankSum what,
                                  const std::vector<std::vector<double>>& of_ranks) = 0;
};

/// While it lives, `stand_in` is called for every sum of this thread. Not nested.
class RankSumScope {
 public:
  explicit RankSumScope(RankSumStandIn& stand_in);
  ~RankSumScope();
  RankSumScope(const RankSumScope&) = delete;
  RankSumScope& operator=(const RankSumScope&) = delete;
};

/// The sums of a sound run.
std::vector<double> added_by_rank(const std::vector<std::vector<double>>& of_ranks);

}  // namespace tessera::train
