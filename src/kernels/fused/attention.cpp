// Attention by ATen's flash attention, or by cuDNN's where libtorch would take it (on Hopper).
// These take [B, heads, T, D] in any order of memory but the last dim's, and fewer keys than
// queries. The results of rope_heads and a projection are views of that, so nothing is copied on
// the way in or out. Parts of a row's queries use flash attention alone, whose causal mask lets the
// last query see the last key where there are more keys; cuDNN's lets the first see the first. Only
// for merely causal attention: borders and windows are in aten/.
#include <ATen/Context.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::fused {
namespace {

/// [B, G, T, R, D] -> [B, G*R, T, D].
at::Tensor by_head(const at::Tensor& x) { return x.transpose(2, 3).flatten(1, 2); }

/// Adds zeros after the D' values of a head: it is as long as one of keys there.
at::Tensor padded(const at::Tensor& heads, std::int64_t head_dim) {
  const std::int64_t missing = head_dim - heads.size(3);
  return missing == 0 ? heads : at::constant_pad_nd(heads, {0, missing});
}

/// [B, T, G*D'] -> [B, G, T, D].
at::Tensor of_groups(const at::Tensor& v, std::int64_t groups, std::int64_t head_dim) {
  return padded(v.unflatten(2, {groups, v.size(2) / groups}).transpose(1, 2), head_dim);
}

/// [B, H, T, D] -> [B, T, H*D'].
at::Tensor by_position(const at::Tensor& heads, std::int64_t head_dim) {
  return heads.narrow(3, 0, head_dim).transpose(1, 2).flatten(2, 3);
}

/// Chooses as libtorch's own attention does: by card, versions, shapes, and settings (never cuDNN
/// where results have to be deterministic).
bool chooses_cudnn(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                   double scale) {
  if (!queries.is_cuda()) return false;
  const auto choice = at::_fused_sdp_choice(queries, keys, values, /*attn_mask=*/{},
                                            /*dropout_p=*/0.0, /*is_causal=*/true, scale,
                                            /*enable_gqa=*/true);
  return choice == static_cast<std::int64_t>(at::SDPBackend::cudnn_attention);
}

// The tensors kept for backward: the inputs, the result, the logarithms of the rows' sums in fp32,
// seed and offset of a dropout that is not used; and one more for cuDNN, by which backward
// recognizes it.
constexpr std::size_t kKeptOfFlash = 7;

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
  return std::get<0>(fused::causal_attention_forward(q, k, v, begins, ends, window, scale));
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& /*begins*/, const std::optional<at::Tensor>& /*ends*/,
    std::int64_t /*window*/, double scale) {
  const at::Tensor queries = by_head(q), keys = by_head(k);
  const at::Tensor values = of_groups(v, q.size(1), q.size(4));
  const WideScope sums;
  const std::int64_t head_dim = v.size(2) / q.size(1);
  if (chooses_cudnn(queries, keys, values, scale)) {
    auto [mixed, log_sum, begins_q, begins_k, most_q, most_k, seed, offset, mask] =
        at::_scaled_dot_product_cudnn_attention(queries, keys, values, /*attn_bias=*/std::nullopt,
                                                /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
                                                /*is_causal=*/true, /*return_debug_mask=*/false,
                                                scale);
    return {
        by_position(mixed, head_dim),
        {queries, keys, values, mixed, log_sum, seed, offset, at::empty({0}, log_sum.options())}};
  }
  auto [mixed, log_sum, begins_q, begins_k, most_q, most_k, seed, offset, mask] =
      at::_scaled_dot_product_flash_attention(queries, keys, values, /*dropout_p=*/0.0,
                                              /*is_causal=*/true, /*return_debug_mask=*/false,
                                              scale);
  return {by_position(mixed, head_dim), {queries, keys, values, mixed, log_sum, seed, offset}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad, at::TensorList kept, const std::optional<at::Tensor>& /*begins*/,
    const std::optional<at::Tensor>& /*ends*/, std::int64_t /*window*/, std::int64_t groups,
    std::int64_t repeat, double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2];
  const std::int64_t positions = queries.size(2);
  const std::int64_t head_dim = grad.size(2) / (groups * repeat);
  const at::Tensor none;  // rows have one length
  const at::Tensor of_result = of_groups(grad, groups * repeat, queries.size(3));
  auto [grad_q, grad_k, grad_v] =
      kept.size() == kKeptOfFlash
          ? at::_scaled_dot_product_flash_attention_backward(
                of_result, queries, keys, values, kept[3], kept[4], none, none, positions,
                positions, /*dropout_p=*/0.0, /*is_causal=*/true, kept[5], kept[6], scale)
          : at::_scaled_dot_product_cudnn_attention_backward(
                of_result, queries, keys, values, kept[3], kept[4], kept[5], kept[6],
                /*attn_bias=*/none, none, none, positions, positions, /*dropout_p=*/0.0,
                /*is_causal=*/true, scale);
  return {grad_q.unflatten(1, {groups, repeat}).transpose(2, 3), grad_k.unsqueeze(3),
          by_position(grad_v, head_dim)};
}

std::tuple<at::Tensor, std::vector<at::Tensor>> part_attention_forward(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& /*begins*/, const std::optional<at::Tensor>& /*ends*/,
    std::int64_t first, std::int64_t /*window*/, double scale) {
  const std::int64_t seen = first + q.size(2);
  const WideScope sums;
  auto [mixed, log_sum, begins_q, begins_k, most_q, most_k, seed, offset, mask] =
      at::_scaled_dot_product_flash_attention(by_head(q), keys.narrow(2, 0, seen),
                                              padded(values.narrow(2, 0, seen), q.size(4)),
                                              /*dropout_p=*/0.0, /*is_causal=*/true,
                                              /*return_debug_mask=*/false, scale);
  return {by_position(mixed, values.size(3)), {log_sum, seed, offset}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> part_attention_backward(
    const at::Tensor& grad, const at::Tensor& result, const at::Tensor& q, const at::Tensor& keys,
    const at::Tensor& values, at::TensorList kept, const std::optional<at::Tensor>& /*begins*/,
    const std::optional<at::Tensor>& /*ends*/, std::int64_t first, std::int64_t /*window*/,
    double scale) {
  const std::int64_t heads = q.size(1) * q.size(3), seen = first + q.size(2);
  const at::Tensor none;  // rows have one length
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_backward(
      of_groups(grad, heads, q.size(4)), by_head(q), keys.narrow(2, 0, seen),
      padded(values.narrow(2, 0, seen), q.size(4)), of_groups(result, heads, q.size(4)), kept[0],
      none, none, q.size(2), seen, /*dropout_p=*/0.0, /*is_causal=*/true, kept[1], kept[2], scale);
  const auto widened = [&](const at::Tensor& found, const at::Tensor& like) {
    const at::Tensor all = at::zeros(like.sizes(), like.options().dtype(at::kFloat));
    all.narrow(2, 0, seen).copy_(found.narrow(3, 0, like.size(3)));
    return all;
  };
  return {grad_q.unflatten(1, {q.size(1), q.size(3)}).transpose(2, 3), widened(grad_k, keys),
          widened(grad_v, values)};
}

}  // namespace tessera::kernels::fused
