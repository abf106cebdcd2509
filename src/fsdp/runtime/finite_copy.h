// A cast that loses a value is an error, not a warning: it names the tensor and what to change.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace tessera::fsdp {

/// to.copy_(from), 1-D of one size. Errors: kContract naming `name` for a finite value that the
/// dtype of `to` makes infinite.
void finite_copy(const at::Tensor& to, const at::Tensor& from, std::string_view name);

}  // namespace tessera::fsdp
