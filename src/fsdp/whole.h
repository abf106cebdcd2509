// Whole parameters from the parts that the ranks of model axes hold.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/unit.h"
#include "layout/local_part.h"

namespace tessera::fsdp {

/// The parameter, or its gradient, in its global shape from this rank's whole local part, flat. A
/// view of `local` where nothing is cut; copies that other ranks hold are not asked for. Collective
/// among the ranks that hold parts. Errors: kComm.
at::Tensor whole_of(Runtime& runtime, const Parameter& parameter, const at::Tensor& local);

/// The elements of `whole` that lie in the box, as a view.
at::Tensor narrow_to(at::Tensor whole, const TensorBox& box);

}  // namespace tessera::fsdp
