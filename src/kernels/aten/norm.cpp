// The norm and rope as Hugging Face's models write them, and the gradients that autograd would
// compute from these operations, in the same order.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rsqrt.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::aten {
namespace {

at::ScalarType wide_dtype(const at::Tensor& x) {
  return at::promote_types(x.scalar_type(), at::kFloat);
}

struct Rotated {
  at::Tensor first, second;  ///< the halves of the last dim of [B, G, T, R, D]
};

Rotated halves(const at::Tensor& x) {
  const std::int64_t half = x.size(4) / 2;
  return {x.narrow(4, 0, half), x.narrow(4, half, half)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps, bool rounds_first) {
  const WideScope mean_of_squares;
  const at::Tensor wide = x.to(wide_dtype(x));
  const at::Tensor scale = at::rsqrt(wide.pow(2).mean(-1, /*keepdim=*/true) + eps);
  const at::Tensor normed = wide * scale;
  const at::Tensor y =
      rounds_first ? normed.to(x.scalar_type()) * weight : normed * weight.to(normed.scalar_type());
  return {y.to(x.scalar_type()), scale.squeeze(-1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool rounds_first) {
  const at::Tensor sum = (x + residual).to(x.scalar_type());
  auto [y, scale] = aten::rms_norm(sum, weight, eps, rounds_first);
  return {sum, y, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale_of_rows,
                                                     bool rounds_first, bool of_weight) {
  const at::Tensor wide = x.to(wide_dtype(x));
  const at::ScalarType inside = wide.scalar_type();
  const at::Tensor scale = scale_of_rows.unsqueeze(-1);
  at::Tensor normed = wide * scale;
  if (rounds_first) normed = normed.to(x.scalar_type());
  const at::Tensor factors = rounds_first ? weight : weight.to(inside);
  const at::Tensor of_product =
      grad.to(at::promote_types(normed.scalar_type(), factors.scalar_type()));
  at::Tensor grad_weight;
  if (of_weight) {
    grad_weight = at::sum_to(of_product * normed, weight.sizes()).to(weight.scalar_type());
  }
  const at::Tensor grad_normed = (of_product * factors).to(normed.scalar_type()).to(inside);
  const at::Tensor grad_scale = (grad_normed * wide).sum(-1, /*keepdim=*/true);
  const at::Tensor grad_mean = -0.5 * grad_scale * scale.pow(3);
  const at::Tensor of_normed = grad_normed * scale;
  const at::Tensor of_scale = grad_mean.expand(x.sizes()) / x.size(-1) * (2 * wide);
  if (!grad_sum || !grad_sum->defined()) {
    return {(of_normed + of_scale).to(x.scalar_type()), grad_weight};
  }
  // The sum's own gradient arrives before the norm's: the engine adds in this order.
  const at::Tensor grad_x = inside == x.scalar_type()
                                ? *grad_sum + of_normed + of_scale
                                : *grad_sum + (of_normed + of_scale).to(x.scalar_type());
  return {grad_x, grad_weight};
}

namespace {

/// Returns a table [T, D/2] or [B, T, D/2] in a shape that broadcasts to [B, G, T, R, D/2].
at::Tensor by_group(const at::Tensor& table) {
  const at::Tensor of_position = table.unsqueeze(-2);
  return table.dim() == 2 ? of_position : of_position.unsqueeze(1);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool rounds_first) {
  at::Tensor split = x.reshape({x.size(0), x.size(1), heads / repeat, repeat, x.size(2) / heads});
  at::Tensor scale;
  if (weight && weight->defined()) {
    std::tie(split, scale) = aten::rms_norm(split, *weight, eps, rounds_first);
    scale = scale.reshape({x.size(0) * x.size(1), heads});
  }
  const auto [first, second] = halves(split.transpose(1, 2));
  const at::Tensor c = by_group(cos);
  const at::Tensor s = by_group(sin);
  return {at::cat({first * c - second * s, second * c + first * s}, /*dim=*/4), scale};
}

std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad,
                                                       const std::optional<at::Tensor>& x,
                                                       const std::optional<at::Tensor>& weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& scale,
                                                       bool rounds_first, bool of_weight) {
  const auto [first, second] = halves(grad);
  const at::Tensor c = by_group(cos);
  const at::Tensor s = by_group(sin);
  at::Tensor split = at::cat({first * c + second * s, second * c - first * s}, /*dim=*/4)
                         .transpose(1, 2);  // [B, T, G, R, D]
  const std::vector<std::int64_t> joined{split.size(0), split.size(1),
                                         split.size(2) * split.size(3) * split.size(4)};
  if (!weight || !weight->defined()) return {split.reshape(joined), at::Tensor()};
  auto [grad_x, grad_weight] = aten::rms_norm_backward(
      split.to(x->scalar_type()), std::nullopt, x->reshape(split.sizes()), *weight,
      scale->reshape(split.sizes().slice(0, 4)), rounds_first, of_weight);
  return {grad_x.reshape(joined), grad_weight};
}

}  // namespace tessera::kernels::aten
