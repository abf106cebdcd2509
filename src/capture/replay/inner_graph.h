// InnerGraph: autograd's graph of a region's body, which one node outside stands for.
//
// Its inputs have no history but an end of their own, which keeps the gradient as it comes. Threads:
// one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/torch_compat.h"

namespace tessera::capture {

class InnerGraph {
 public:
  /// `inputs` become those that the body is given.
  void enter(std::vector<at::Tensor>& inputs);
  /// From those of `results` for which a gradient came: the gradients of the inputs, undefined where
  /// there is none. Inside of a backward, whose graph is kept or not as this one then is. Parameters get
  /// theirs by their sinks. An end that another backward reaches throws (kUsage).
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& results,
                                   const std::vector<at::Tensor>& gradients);
  void clear() { ends_.clear(); }

 private:
  std::vector<compat::NodePtr> ends_;  // by input; null: it needs no gradient
};

/// What a program can not hand on of the graph inside: where it leads to but to inputs and slots, whose
/// gradients are recorded, and who listens in it; empty: nothing. `begin` is the number of its first
/// node.
std::string leads_out(const std::vector<at::Tensor>& results, std::uint64_t begin);

}  // namespace tessera::capture
