// Helpers for backward passes without a derivative, and for layers with higher derivatives.
//
// [Note: left-out results] Where a node has several results, as a sharded module does, and a
// backward uses some of them, the functions that made the others run as well, with undefined
// gradients. Autograd fills these up with zeros unless it is told not to (set_materialize_grads).
// Parameters of an unused result would then have gradients of zeros, by which an optimizer updates
// them, where at::linear gives them none. So Tessera's functions accept undefined gradients and
// pass them on. Functions that communicate in their backward take the zeros.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/error.h"

namespace tessera::base {

/// Refuses a graph over such a backward (create_graph), which would be silently wrong.
/// Errors: kUsage.
inline void refuse_double_backward() {
  TESSERA_CHECK(
      !c10::GradMode::is_enabled(), ErrorKind::kUsage,
      "backward: found create_graph, expected none; second derivatives are not supported");
}

/// Whether layers call their kernels without a node of their own around them: in fp64, in which
/// derivatives are checked. The kernels are ATen operations there, and autograd keeps their graph,
/// which it can differentiate any number of times. That costs memory, which the nodes save in other
/// dtypes.
inline bool has_second_derivatives(const at::Tensor& x) { return x.scalar_type() == at::kDouble; }

}  // namespace tessera::base
