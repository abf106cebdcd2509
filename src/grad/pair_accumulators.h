// PairAccumulators: the AccumulateGrad nodes of the units that the forward of a pair is inside of.
//
// libtorch keeps one node for a leaf, and each forward of a unit has separate nodes ([Note: one
// leaf a use] in grad/leaf.h). While the forward is inside a unit, the backward of the pair may run
// a checkpoint there again, with the same leaves. So each pass has its own nodes, and every change
// of turns exchanges them. Otherwise uses of a leaf that autograd adds up in sequence would arrive
// in two sums, or those of two calls in one sum, which is rounded. Threads: the rank's thread.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/torch_compat.h"
#include "grad/leaf.h"

namespace tessera::grad {

class PairAccumulators {
 public:
  /// The forward enters a unit with these leaves. Must be called before it renews their nodes.
  void enter(const std::vector<std::shared_ptr<Leaf>>& leaves);
  /// The forward leaves the unit that it entered last.
  void leave();
  /// Exchanges the nodes, when the other pass resumes.
  void exchange();

 private:
  struct OfOther {
    std::shared_ptr<Leaf> leaf;
    compat::NodePtr node;  ///< null: its next use makes one
  };
  std::vector<OfOther> others_;        // nodes of the suspended pass, one for each leaf
  std::vector<std::size_t> at_enter_;  // by open call: size of others_ at its beginning
};

}  // namespace tessera::grad
