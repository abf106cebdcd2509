#include "nn/state/gated_rms_norm.h"

#include <ATen/ATen.h>

#include "tessera/wide_scope.h"

namespace tessera::nn {

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight,
                          double eps) {
  const WideScope wide;
  const at::Tensor in = x.to(at::promote_types(x.scalar_type(), at::kFloat));
  const at::Tensor normed = in * (in.pow(2).mean(-1, true) + eps).rsqrt();
  return (weight * normed.to(x.scalar_type()) * at::silu(z.to(in.scalar_type())))
      .to(x.scalar_type());
}

}  // namespace tessera::nn
