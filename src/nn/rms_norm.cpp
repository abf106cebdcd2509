#include "nn/rms_norm.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "nn/parameter.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {

at::Tensor rms_norm_composite(const at::Tensor& x, const at::Tensor& weight, double eps,
                              NormRounding rounding) {
  const WideScope mean_of_squares;
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  const at::Tensor wide = x.to(inside);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  if (rounding == NormRounding::kOnce) return (normed * weight.to(inside)).to(x.scalar_type());
  return (normed.to(x.scalar_type()) * weight).to(x.scalar_type());
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    NormRounding rounding) {
  return cpu::has_kernels(x, weight) ? cpu::rms_norm(x, weight, eps)
                                     : rms_norm_composite(x, weight, eps, rounding);
}

at::Tensor plain_rms_norm(const at::Tensor& x, double eps) {
  // A product with 1 changes no bit.
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  return rms_norm(x, at::ones({x.size(-1)}, x.options().dtype(inside)), eps, NormRounding::kOnce);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps, NormRounding rounding) {
  if (cpu::has_kernels(x, weight) && residual.scalar_type() == x.scalar_type()) {
    return cpu::add_rms_norm(x, residual, weight, eps);
  }
  const at::Tensor sum = (x + residual).to(x.scalar_type());
  return {sum, rms_norm_composite(sum, weight, eps, rounding)};
}

RmsNorm::RmsNorm(std::int64_t size, double eps, NormRounding rounding, ParameterLayout layout)
    : eps_(eps), rounding_(rounding) {
  weight = register_parameter("weight", empty_parameter({size}));
  declare("weight", std::move(layout));
}

at::Tensor RmsNorm::forward(const at::Tensor& x) { return rms_norm(x, weight, eps_, rounding_); }

SumAndNorm RmsNorm::add_forward(const at::Tensor& x, const at::Tensor& residual) {
  return add_rms_norm(x, residual, weight, eps_, rounding_);
}

}  // namespace tessera::nn
