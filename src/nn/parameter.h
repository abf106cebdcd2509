// Parameters that begin without memory, and parameters that share it.
//
// A layer creates its parameters with full sizes and no storage; loading, initialization or
// sharding fills them, so that no rank ever holds a model whole. Until then every access throws.
// This is the same state that a released unsharded parameter has (design.md, [Note: release]).
// Next: linear.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace tessera::nn {

/// An fp32 leaf that requires grad, with these sizes and a storage of 0 bytes. Touching its data is
/// an error that says "parameter has no data yet".
at::Tensor empty_parameter(at::IntArrayRef sizes);

/// Whether the tensor's storage holds its elements.
bool has_data(const at::Tensor& tensor);

/// Gives zeros to every parameter of the module that has no data: for use without sharding.
void materialize(const torch::nn::Module& module);

/// Lets `alias` use the storage of `owner`: two leaves over one memory, so that each use of a tied
/// weight has a gradient of its own (design.md, [Note: one leaf a use]). `alias` stays the tensor
/// object it is; what it held is dropped. Errors: kContract if sizes or dtypes differ.
void tie(const at::Tensor& alias, const at::Tensor& owner);

}  // namespace tessera::nn
