// A cast that loses a value is an error, not a warning: it names the tensor and what to change.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tessera/contract.h"

namespace tessera::grad {

/// to.copy_(from), 1-D of one size. Errors: kContract naming `name` for a finite value that the
/// dtype of `to` makes infinite.
void finite_copy(const at::Tensor& to, const at::Tensor& from, std::string_view name);

/// Values of a parameter as they are loaded: by way of GradContract::loaded_through. Errors: the
/// same, also of that dtype.
void load_values(const at::Tensor& to, const at::Tensor& from, const GradContract& contract);

}  // namespace tessera::grad
