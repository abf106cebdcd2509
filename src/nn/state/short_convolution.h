#pragma once
#include <ATen/core/Tensor.h>
#include "nn/documents.h"
namespace tessera::nn {
at::Tensor short_convolution(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const Documents& documents);
at::Tensor short_convolution_after(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::Tensor& context);
}
