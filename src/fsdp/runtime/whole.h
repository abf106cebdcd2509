// Assembles whole parameters: those of a bucket from its slices, and one parameter from the parts
// that the ranks of model axes hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/runtime/unit.h"
#include "layout/local_part.h"

namespace tessera::fsdp {

/// Returns [plan().numel] from each rank's `slice` of the bucket's parameters, or of tensors laid
/// out like them; the slice itself where no other rank shares the bucket. Collective. `what` is
/// part of the label.
at::Tensor whole_of(Runtime& runtime, const Unit& unit, const Bucket& bucket,
                    const at::Tensor& slice, const char* what);

/// Returns the parameter, or its gradient, in its global shape from this rank's whole local part,
/// flat. Returns a view of `local` where no axis cuts it; copies on other ranks are not read.
/// Collective among the ranks that hold parts. Errors: kComm.
at::Tensor whole_of(Runtime& runtime, const Parameter& parameter, const at::Tensor& local);

/// Whether values can be copied from it: it is defined, dense and not on the meta device.
bool has_values(const at::Tensor& tensor);

/// Cuts the local tensor of the rank at `coordinates`, flat, out of the whole parameter's elements.
at::Tensor local_part(const at::Tensor& whole, const ParameterLayout& layout,
                      const std::vector<std::int64_t>& shape, const std::vector<int>& coordinates);

}  // namespace tessera::fsdp
