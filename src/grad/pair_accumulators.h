// PairAccumulators: the AccumulateGrad nodes of units that the forward of a pair is inside of.
//
// libtorch keeps one node for a leaf, and a forward of a unit has nodes of its own ([Note: one leaf a
// use] in grad/leaf.h). While the forward is inside a unit, the backward beside it may run a
// checkpoint there again, with the same leaves. So each pass has its own nodes, which a turn
// exchanges: else uses of a leaf that autograd adds up in turn would arrive in two sums, or those of
// two calls in one, which is rounded. Threads: the rank's own.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/torch_compat.h"
#include "grad/leaf.h"

namespace tessera::grad {

class PairAccumulators {
 public:
  /// The forward enters a unit of these leaves, and has not renewed their nodes yet.
  void enter(const std::vector<std::shared_ptr<Leaf>>& leaves);
  /// The forward leaves the unit that it entered last.
  void leave();
  /// The other pass resumes.
  void exchange();

 private:
  struct OfOther {
    std::shared_ptr<Leaf> leaf;
    compat::NodePtr node;  ///< null: its next use makes one
  };
  std::vector<OfOther> others_;        // of the pass that is suspended; once a leaf
  std::vector<std::size_t> at_enter_;  // by open call: how many there were
};

}  // namespace tessera::grad
