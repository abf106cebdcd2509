// For backward passes that have no derivative of their own, and for what has further ones.
//
// [Note: left-out results] Where a node gives several results, as a sharded module does, and a
// backward uses some of them, what made the others runs as well, with undefined gradients. Autograd
// fills these up with zeros, if it is not told to leave them (set_materialize_grads); parameters
// behind a left-out result would then have gradients of zeros, by which an optimizer steps, where
// at::linear gives them none. So our functions take undefined gradients and hand them on. What
// communicates in its backward takes the zeros.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/error.h"

namespace tessera::base {

/// A graph built over such a backward (create_graph) would be silently wrong.
/// Errors: kUsage.
inline void refuse_double_backward() {
  TESSERA_CHECK(
      !c10::GradMode::is_enabled(), ErrorKind::kUsage,
      "backward: found create_graph, expected none; second derivatives are not supported");
}

/// In fp64, which derivatives are checked in, layers call their kernels without a node of their own
/// around them: those are ATen operations there, whose graph autograd keeps and differentiates as
/// often as it is asked to. It costs memory, for which the other dtypes have our nodes.
inline bool has_second_derivatives(const at::Tensor& x) { return x.scalar_type() == at::kDouble; }

}  // namespace tessera::base
