// The autograd nodes at the edges of a unit's forward: they tell the runtime when its backward
// begins and ends.
//
// Identity nodes, made by hand: a custom Function would make its outputs views, which users may not
// change in place. One node over all outputs fires before anything inside runs; one over all inputs
// (the marker of [Note: readiness]) after everything inside has run, since its sequence number is
// lower.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "fsdp/runtime.h"

namespace tessera::fsdp {

/// Replaces the grad-requiring ones among `inputs` by aliases behind the marker. Returns whether
/// there were any.
bool mark_inputs(const std::vector<at::Tensor*>& inputs, const std::shared_ptr<Entry>& entry);
/// Replaces the grad-requiring ones among `outputs` by aliases behind the pre-backward node.
/// Returns whether there were any.
bool mark_outputs(const std::vector<at::Tensor*>& outputs, const std::shared_ptr<Entry>& entry);

}  // namespace tessera::fsdp
