// InnerGraph: the autograd graph of a region's body; one node of the outer graph stands for it.
//
// Its inputs have no history except an end each, which keeps the gradient as it comes. Threads:
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
  /// Replaces `inputs` by those that the body is given.
  void enter(std::vector<at::Tensor>& inputs);
  /// Returns the gradients of the inputs, undefined where there is none, from those of `results`
  /// for which a gradient came. To be called inside a backward, whose graph is kept or not as this
  /// one then is. Parameters get their gradients by their sinks. An end that another backward
  /// reaches throws (kUsage).
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& results,
                                   const std::vector<at::Tensor>& gradients);
  void clear() { ends_.clear(); }

 private:
  std::vector<compat::NodePtr> ends_;  // by input; null: it needs no gradient
};

/// Returns what a program cannot pass on of the inner graph: edges to anything except inputs and
/// slots, whose gradients are recorded, and hooks in it; empty: nothing. `begin` is the number of
/// its first node.
std::string leads_out(const std::vector<at::Tensor>& results, std::uint64_t begin);

}  // namespace tessera::capture
