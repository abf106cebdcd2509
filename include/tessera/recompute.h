// checkpoint(): activation recomputation that handles know about.
//
// It keeps only the inputs of a function and runs the function again in backward. Compose it as
// unit(checkpoint(block)) or checkpoint(unit(block)); both give the gradients of the plain call,
// bit for bit, and gather as often as the plain call. See [Note: recomputation] in
// fsdp/runtime/recompute_scopes.h. The second run gets the random numbers of libtorch's default CPU
// generator (at::dropout) and the autocast state of the first, and restores both afterwards. Other
// generators are not restored. Ranks that are threads of one process share the default generator,
// so random results differ from run to run there, with checkpoint() or without. Next:
// recompute_mode.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/keep.h"
#include "tessera/recompute_mode.h"

namespace tessera {

/// Returns function(inputs), which runs again in backward. Gradients flow to `inputs` and to every
/// parameter that the function uses. All tensors of the function are among `inputs` (undefined ones
/// too) or belong to modules that outlive the backward. Without grad mode it is a plain call. Where
/// neither inputs nor parameters need a gradient, call the function itself, since this would
/// recompute it for nothing. Errors: kUsage where the function changes an input in place, in a
/// backward towards chosen tensors (torch::autograd::grad, backward() with inputs), and where the
/// second run gives other results (number, sizes, dtypes) or calls other units than the first.
at::Tensor checkpoint(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                      const std::vector<at::Tensor>& inputs,
                      RecomputeMode mode = RecomputeMode::kFull);

/// The same for a function with several results, each of which may stay unused.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, RecomputeMode mode = RecomputeMode::kFull);

}  // namespace tessera
