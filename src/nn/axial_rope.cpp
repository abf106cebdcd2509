#include "nn/axial_rope.h"

#include <ATen/ops/cat.h>

namespace tessera::nn {

AxialTable axial_table(const at::Tensor& positions, std::int64_t head_dim, double theta,
                       at::ScalarType dtype) {
  const at::Tensor frequencies =
      inverse_frequencies({.theta = theta}, head_dim / 2).to(positions.device());
  const at::Tensor angles = positions.to(at::kFloat).unsqueeze(3) * frequencies;
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

at::Tensor axial_rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                            const AxialTable& table) {
  const std::int64_t head_dim = x.size(2) / layout.heads;
  at::Tensor heads =
      x.reshape({x.size(0), x.size(1), layout.heads / layout.repeat, layout.repeat, head_dim});
  if (norm.weight.defined()) heads = rms_norm(heads, norm.weight, norm.eps, norm.rounding);
  // [N, P, G, R, 2 axes, 2 of a pair, D/4]
  const at::Tensor pairs =
      heads.view({heads.size(0), heads.size(1), heads.size(2), heads.size(3), 2, 2, head_dim / 4});
  const at::Tensor first = pairs.select(5, 0);
  const at::Tensor second = pairs.select(5, 1);
  const at::Tensor cos = table.cos.unsqueeze(2).unsqueeze(2);
  const at::Tensor sin = table.sin.unsqueeze(2).unsqueeze(2);
  const at::Tensor turned =
      at::cat({first * cos - second * sin, second * cos + first * sin}, /*dim=*/5);
  return turned.reshape(heads.sizes()).transpose(1, 2).contiguous();
}

}  // namespace tessera::nn
