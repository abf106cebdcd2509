#include "nn/rms_norm.h"

#include <ATen/ops/rsqrt.h>

#include "nn/parameter.h"

namespace tessera::nn {

at::Tensor rms_norm_composite(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::ScalarType inside = at::promote_types(x.scalar_type(), at::kFloat);
  const at::Tensor wide = x.to(inside);
  const at::Tensor normed = wide * at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  return (normed.to(x.scalar_type()) * weight).to(x.scalar_type());
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return rms_norm_composite(x, weight, eps);
}

RmsNorm::RmsNorm(std::int64_t size, double eps) : eps_(eps) {
  weight = register_parameter("weight", empty_parameter({size}));
}

at::Tensor RmsNorm::forward(const at::Tensor& x) { return rms_norm(x, weight, eps_); }

}  // namespace tessera::nn
