// Casts that make a finite value infinite are errors, which name the tensor and the remedy.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "tessera/contract.h"

namespace tessera::grad {

/// Does to.copy_(from), for 1-D tensors of one size. Errors: kContract naming `name` for a finite
/// value that the dtype of `to` makes infinite.
void finite_copy(const at::Tensor& to, const at::Tensor& from, std::string_view name);

/// Copies loaded values of a parameter, through the dtype GradContract::loaded_through. Errors:
/// those of finite_copy, for that dtype, too.
void load_values(const at::Tensor& to, const at::Tensor& from, const GradContract& contract);

}  // namespace tessera::grad
