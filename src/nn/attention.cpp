#include "nn/attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>
#include <utility>

namespace tessera::nn {

at::Tensor causal_attention_composite(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      double scale) {
  const std::int64_t rows = q.size(0);
  const std::int64_t heads = q.size(1);
  const std::int64_t positions = q.size(2);
  const std::int64_t head_dim = q.size(3);
  const std::int64_t groups = k.size(1);
  // Query heads of one group stand together: [B, G, H/G, T, D] against [B, G, 1, T, D].
  const at::Tensor grouped = q.view({rows, groups, heads / groups, positions, head_dim});
  const at::Tensor values =
      v.view({rows, positions, groups, 1, head_dim}).permute({0, 2, 3, 1, 4});
  const at::Tensor scores = at::matmul(grouped, k.unsqueeze(2).transpose(3, 4)) * scale;
  const at::Tensor position = at::arange(positions, q.device());
  const at::Tensor later = position.unsqueeze(0) > position.unsqueeze(1);
  const at::ScalarType inside = at::promote_types(q.scalar_type(), at::kFloat);
  const at::Tensor weights =
      at::softmax(scores.to(inside).masked_fill(later, -std::numeric_limits<double>::infinity()), 4)
          .to(q.scalar_type());
  const at::Tensor mixed = at::matmul(weights, values);  // [B, G, H/G, T, D]
  return mixed.permute({0, 3, 1, 2, 4}).reshape({rows, positions, heads * head_dim});
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return causal_attention_composite(q, k, v, scale);
}

Attention::Attention(const AttentionOptions& options, std::shared_ptr<Rope> rope)
    : options_(options), rope_(std::move(rope)) {
  const std::int64_t q_size = options.heads * options.head_dim;
  const std::int64_t kv_size = options.kv_heads * options.head_dim;
  const auto projection = [&](const char* name, std::int64_t in, std::int64_t out) {
    return register_module(name, std::make_shared<Linear>(in, out, options.bias));
  };
  q_proj_ = projection("q_proj", options.hidden_size, q_size);
  k_proj_ = projection("k_proj", options.hidden_size, kv_size);
  v_proj_ = projection("v_proj", options.hidden_size, kv_size);
  o_proj_ = projection("o_proj", q_size, options.hidden_size);
  if (options.qk_norm == AttentionOptions::QkNorm::kYes) {
    const auto norm = [&](const char* name) {
      return register_module(name, std::make_shared<RmsNorm>(options.head_dim, options.norm_eps));
    };
    q_norm_ = norm("q_norm");
    k_norm_ = norm("k_norm");
  }
}

at::Tensor Attention::forward(const at::Tensor& x) {
  const auto head_norm = [&](const std::shared_ptr<RmsNorm>& norm) {
    return norm ? HeadNorm{norm->weight, norm->eps()} : HeadNorm{};
  };
  const RopeTable table = rope_->table(x.size(1), x.scalar_type(), x.device());
  const at::Tensor q =
      rope_heads(q_proj_->forward(x), options_.heads, head_norm(q_norm_), table);
  const at::Tensor k =
      rope_heads(k_proj_->forward(x), options_.kv_heads, head_norm(k_norm_), table);
  const at::Tensor v = v_proj_->forward(x);
  const double scale = 1.0 / std::sqrt(static_cast<double>(options_.head_dim));
  return o_proj_->forward(causal_attention(q, k, v, scale));
}

}  // namespace tessera::nn
