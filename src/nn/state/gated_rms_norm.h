#pragma once
#include <ATen/core/Tensor.h>
namespace tessera::nn {
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight, double eps);
}
