// Attention by ATen's flash attention, which takes [B, heads, T, D] in any order of memory but the
// last dim's, and fewer keys than queries: what rope_heads and a projection give is a view of it,
// so that nothing is copied on the way in or out.
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::fused {
namespace {

/// [B, G, T, R, D] -> [B, G*R, T, D].
at::Tensor by_head(const at::Tensor& x) { return x.transpose(2, 3).flatten(1, 2); }

/// [B, T, G*D'] -> [B, G, T, D], zeros behind D': a head of values is as long as one of keys there.
at::Tensor of_groups(const at::Tensor& v, std::int64_t groups, std::int64_t head_dim) {
  const at::Tensor heads = v.unflatten(2, {groups, v.size(2) / groups}).transpose(1, 2);
  const std::int64_t missing = head_dim - heads.size(3);
  return missing == 0 ? heads : at::constant_pad_nd(heads, {0, missing});
}

/// [B, H, T, D] -> [B, T, H*D'].
at::Tensor by_position(const at::Tensor& heads, std::int64_t head_dim) {
  return heads.narrow(3, 0, head_dim).transpose(1, 2).flatten(2, 3);
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return std::get<0>(fused::causal_attention_forward(q, k, v, scale));
}

// Kept: the inputs as they are, the result, the logarithms of the rows' sums [B, H, T] in fp32, and
// seed and offset of the dropout that there is not.
std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(const at::Tensor& q,
                                                                         const at::Tensor& k,
                                                                         const at::Tensor& v,
                                                                         double scale) {
  const at::Tensor queries = by_head(q), keys = by_head(k);
  const at::Tensor values = of_groups(v, q.size(1), q.size(4));
  const WideScope sums;
  auto [mixed, log_sum, begins_q, begins_k, most_q, most_k, seed, offset, mask] =
      at::_scaled_dot_product_flash_attention(queries, keys, values, /*dropout_p=*/0.0,
                                              /*is_causal=*/true, /*return_debug_mask=*/false,
                                              scale);
  return {by_position(mixed, v.size(2) / q.size(1)),
          {queries, keys, values, mixed, log_sum, seed, offset}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(const at::Tensor& grad,
                                                                         at::TensorList kept,
                                                                         std::int64_t groups,
                                                                         std::int64_t repeat,
                                                                         double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2];
  const std::int64_t positions = queries.size(2);
  const std::int64_t head_dim = grad.size(2) / (groups * repeat);
  const at::Tensor none;  // rows are of one length
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_backward(
      of_groups(grad, groups * repeat, queries.size(3)), queries, keys, values, kept[3], kept[4],
      none, none, positions, positions, /*dropout_p=*/0.0, /*is_causal=*/true, kept[5], kept[6],
      scale);
  return {grad_q.unflatten(1, {groups, repeat}).transpose(2, 3), grad_k.unsqueeze(3),
          by_position(grad_v, head_dim)};
}

}  // namespace tessera::kernels::fused
