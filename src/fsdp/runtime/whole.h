// Assembles whole parameters: those of a bucket from its slices, and one parameter from the parts
// that the ranks of model axes hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/runtime/unit.h"
#include "layout/local_part.h"

namespace tessera::fsdp {

/// Gathers each rank's `slice` of the bucket's parameters, or of tensors laid out like them.
/// Returns [plan().numel], or the slice itself where no other rank shares the bucket. Collective.
/// `what` is part of the label.
at::Tensor whole_of(Runtime& runtime, const Unit& unit, const Bucket& bucket,
                    const at::Tensor& slice, const char* what);

/// Returns a parameter, or its gradient, in its global shape. `local` is this rank's part of it,
/// flat and unsharded. Where no axis cuts the parameter, returns a view of `local`: copies on other
/// ranks are not read. Collective among the ranks that hold parts. Errors: kComm.
at::Tensor whole_of(Runtime& runtime, const Parameter& parameter, const at::Tensor& local);

/// Whether values can be copied from the tensor: it is defined, dense and not on the meta device.
bool has_values(const at::Tensor& tensor);

/// Returns the part of the whole parameter that the rank at `coordinates` holds, flat.
at::Tensor local_part(const at::Tensor& whole, const ParameterLayout& layout,
                      const std::vector<std::int64_t>& shape, const std::vector<int>& coordinates);

}  // namespace tessera::fsdp
