// The norm and rope by ATen's fused norm, and as few passes over the heads as ATen's operations
// allow. The norm stays in fp32 and rounds once, as cpu/ does.
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::fused {
namespace {

/// Returns the one dtype that a device's norm takes: a wider weight widens what is normed, which is
/// still rounded once.
at::ScalarType one_dtype(const at::Tensor& x, const at::Tensor& weight) {
  return at::promote_types(x.scalar_type(), weight.scalar_type());
}

/// x [..., K] -> the norm, and its scale [..., 1].
std::tuple<at::Tensor, at::Tensor> normed(const at::Tensor& x, const at::Tensor& weight,
                                          double eps) {
  const WideScope mean_of_squares;
  const at::ScalarType inside = one_dtype(x, weight);
  auto [y, scale] = at::_fused_rms_norm(x.to(inside), weight.sizes(), weight.to(inside), eps);
  return {y.to(x.scalar_type()), scale};
}

/// scale [..., 1] -> gradients of x in its dtype, and of the weight in its own where it is wanted.
std::tuple<at::Tensor, at::Tensor> normed_backward(const at::Tensor& grad, const at::Tensor& x,
                                                   const at::Tensor& weight,
                                                   const at::Tensor& scale, bool of_weight) {
  const at::ScalarType inside = one_dtype(x, weight);
  auto [grad_x, grad_weight] = at::_fused_rms_norm_backward(
      grad.to(inside).contiguous(), x.to(inside), weight.sizes(), scale, weight.to(inside),
      /*output_mask=*/{true, of_weight});
  return {grad_x.to(x.scalar_type()),
          of_weight ? grad_weight.to(weight.scalar_type()) : at::Tensor()};
}

/// Rotates pairs (i, i + D/2) of x [B, T, H, D] by cos and sin [T, D/2] or [B, T, D/2]: one
/// product, then to each half the other's part.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const auto halves = [&](const at::Tensor& of) { return of.unflatten(3, {2, x.size(3) / 2}); };
  const at::Tensor from = halves(x);
  const at::Tensor c = cos.unsqueeze(-2).unsqueeze(-2);
  const at::Tensor s = sin.unsqueeze(-2);
  const at::Tensor pairs = at::mul(from, c);
  pairs.select(3, 0).addcmul_(from.select(3, 1), s, -sign);
  pairs.select(3, 1).addcmul_(from.select(3, 0), s, sign);
  return pairs.flatten(3, 4);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps, bool /*rounds_first*/) {
  auto [y, scale] = normed(x, weight, eps);
  return {y, scale.squeeze(-1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool rounds_first) {
  const at::Tensor sum = (x + residual).to(x.scalar_type()).contiguous();
  auto [y, scale] = fused::rms_norm(sum, weight, eps, rounds_first);
  return {sum, y, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale, bool /*rounds_first*/,
                                                     bool of_weight) {
  auto [grad_x, grad_weight] = normed_backward(grad, x, weight, scale.unsqueeze(-1), of_weight);
  if (grad_sum && grad_sum->defined()) grad_x.add_(*grad_sum);
  return {grad_x, grad_weight};
}

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool /*rounds_first*/) {
  at::Tensor split = x.view({x.size(0), x.size(1), heads, x.size(2) / heads});
  at::Tensor scale;
  if (weight && weight->defined()) {
    std::tie(split, scale) = normed(split, *weight, eps);
    scale = scale.reshape({x.size(0) * x.size(1), heads});
  }
  // [B, T, H, D] as [B, G, T, R, D]: a view, which attention takes without a copy.
  return {turned(split, cos, sin, 1.0).unflatten(2, {heads / repeat, repeat}).transpose(1, 2),
          scale};
}

std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad,
                                                       const std::optional<at::Tensor>& x,
                                                       const std::optional<at::Tensor>& weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& scale,
                                                       bool /*rounds_first*/, bool of_weight) {
  const at::Tensor by_position = grad.transpose(1, 2).flatten(2, 3);  // [B, T, H, D]
  at::Tensor split = turned(by_position, cos, sin, -1.0);
  at::Tensor grad_weight;
  if (weight && weight->defined()) {
    std::tie(split, grad_weight) =
        normed_backward(split, x->view(split.sizes()), *weight,
                        scale->view({split.size(0), split.size(1), split.size(2), 1}), of_weight);
  }
  return {split.flatten(2, 3), grad_weight};
}

}  // namespace tessera::kernels::fused
