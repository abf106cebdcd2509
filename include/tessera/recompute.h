// checkpoint(): activation recomputation that handles know about.
//
// Keeps only the inputs of `function` and runs it again in backward. Compose it as
// unit(checkpoint(block)) or checkpoint(unit(block)); both give the gradients of the plain call,
// bit for bit, and gather what the plain call gathers. See [Note: recomputation] in
// fsdp/runtime/recompute_scopes.h. The second run finds the random numbers of libtorch's default
// CPU generator (at::dropout) and the autocast state of the first, and leaves those around backward
// as they were. Generators of your own are not restored. Ranks that are threads of one process
// share that generator: there what is random differs from run to run, with checkpoint() or without.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "tessera/keep.h"
#include "tessera/recompute_mode.h"

namespace tessera {

/// function(inputs), recomputed in backward. Gradients flow to `inputs` and to every parameter that
/// the function uses. Its tensors must all come in through `inputs` (undefined ones may be among
/// them) or belong to modules that outlive the backward. Without grad mode: a plain call. Where
/// neither inputs nor parameters want a gradient call the function itself: this would recompute it.
/// Errors: kUsage where the function changes an input in place; in a backward towards chosen
/// tensors (torch::autograd::grad, backward() with inputs); where the second run gives other
/// results (their number, sizes, dtypes) or makes other calls of units than the first.
at::Tensor checkpoint(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                      const std::vector<at::Tensor>& inputs,
                      RecomputeMode mode = RecomputeMode::kFull);

/// The same with more than one result; each may be used or not.
std::vector<at::Tensor> checkpoint(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs, RecomputeMode mode = RecomputeMode::kFull);

}  // namespace tessera
