// checkpoint(): activation recomputation that handles know about.
//
// Keeps only the inputs of `function` and runs it again in backward. Compose it as
// unit(checkpoint(block)) or checkpoint(unit(block)); both give the gradients of the plain call.
// See [Note: recomputation] in fsdp/recompute.h. Random numbers of libtorch's default CPU generator
// (at::dropout) come again as they came the first time, and go on afterwards as if nothing had been
// recomputed. Generators of your own are not restored. Ranks that are threads of one process share
// that generator: there what is random differs from run to run, with checkpoint() or without.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

/// function(inputs), recomputed in backward. Gradients flow to `inputs` and to every parameter that
/// the function uses. Its tensors must all come in through `inputs` or be parameters.
at::Tensor checkpoint(std::function<at::Tensor(const std::vector<at::Tensor>&)> function,
                      const std::vector<at::Tensor>& inputs);

}  // namespace tessera
