#include "nn/rms_norm.h"

#include <ATen/ops/rsqrt.h>

#include "nn/cpu/dispatch.h"
#include "nn/cpu/functions.h"
#include "nn/parameter.h"

namespace tessera::nn {

at::Tensor rms_norm_composite(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  const at::Tensor wide = x.to(inside);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  return (normed.to(x.scalar_type()) * weight).to(x.scalar_type());
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return cpu::has_kernels(x, weight) ? cpu::rms_norm(x, weight, eps)
                                     : rms_norm_composite(x, weight, eps);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps) {
  if (cpu::has_kernels(x, weight) && residual.scalar_type() == x.scalar_type()) {
    return cpu::add_rms_norm(x, residual, weight, eps);
  }
  const at::Tensor sum = (x + residual).to(x.scalar_type());
  return {sum, rms_norm_composite(sum, weight, eps)};
}

RmsNorm::RmsNorm(std::int64_t size, double eps) : eps_(eps) {
  weight = register_parameter("weight", empty_parameter({size}));
}

at::Tensor RmsNorm::forward(const at::Tensor& x) { return rms_norm(x, weight, eps_); }

SumAndNorm RmsNorm::add_forward(const at::Tensor& x, const at::Tensor& residual) {
  return add_rms_norm(x, residual, weight, eps_);
}

}  // namespace tessera::nn
