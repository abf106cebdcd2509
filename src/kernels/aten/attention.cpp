// Attention with whole rows of scores, and the softmax of a block of them.
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>

#include <limits>

#include "kernels/implementations.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::aten {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

/// [T, 1, N] bool: keys behind the query, the last of N positions' queries being the last one.
at::Tensor behind(std::int64_t queries, std::int64_t keys, const at::Device& device) {
  const at::Tensor position = at::arange(keys, at::TensorOptions(at::kLong).device(device));
  return position > position.narrow(0, keys - queries, queries).view({queries, 1, 1});
}

struct Weighed {
  at::Tensor values;  ///< [B*G, T*R, D'], in the queries' dtype
  at::Tensor wide;    ///< the weights [B*G, T*R, N], as wide as they were formed
};

/// queries [B*G, T*R, D], keys and values [B*G, N, D].
Weighed weigh(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
              std::int64_t repeat, double scale) {
  const at::Tensor scores = at::bmm(queries, keys.transpose(1, 2)) * scale;
  const at::ScalarType dtype = queries.scalar_type();
  const std::int64_t positions = queries.size(1) / repeat;
  Weighed result;
  const at::Tensor weights = [&] {
    const WideScope softmax;
    const at::Tensor masked =
        scores.to(at::promote_types(dtype, at::kFloat))
            .view({queries.size(0), positions, repeat, keys.size(1)})
            .masked_fill(behind(positions, keys.size(1), queries.device()), kNothing);
    result.wide = at::softmax(masked, 3).view(scores.sizes());
    return result.wide.to(dtype);
  }();
  result.values = at::bmm(weights, values);
  return result;
}

/// [B, G, N, D] -> [B*G, N, D].
at::Tensor joined_heads(const at::Tensor& x) {
  return x.reshape({x.size(0) * x.size(1), x.size(2), x.size(3)});
}

/// [B*G, T*R, D'] -> [B, T, G*R*D'].
at::Tensor by_position_of(const at::Tensor& x, const at::Tensor& q) {
  return x.view({q.size(0), q.size(1), q.size(2), q.size(3) * x.size(2)})
      .transpose(1, 2)
      .reshape({q.size(0), q.size(2), q.size(1) * q.size(3) * x.size(2)});
}

/// v [B, T, G*D'] -> [B*G, T, D'].
at::Tensor values_of(const at::Tensor& v, const at::Tensor& q) {
  const std::int64_t head_dim = v.size(2) / q.size(1);
  return joined_heads(v.reshape({q.size(0), q.size(2), q.size(1), head_dim}).transpose(1, 2));
}

/// [Q, 1, N] bool: what no query of a block sees of its keys.
at::Tensor outside_window(const at::Tensor& scores, std::int64_t queries, std::int64_t first,
                          std::int64_t window) {
  const auto options = at::TensorOptions(at::kLong).device(scores.device());
  const at::Tensor key = at::arange(scores.size(2), options);
  const at::Tensor own = at::arange(first, first + queries, options).view({-1, 1, 1});
  return (key > own).logical_or(own - key >= window);
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return std::get<0>(aten::causal_attention_forward(q, k, v, scale));
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(const at::Tensor& q,
                                                                         const at::Tensor& k,
                                                                         const at::Tensor& v,
                                                                         double scale) {
  const at::Tensor queries =
      joined_heads(q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)}));
  const at::Tensor keys = joined_heads(k.squeeze(3));
  const at::Tensor values = values_of(v, q);
  const Weighed weighed = weigh(queries, keys, values, q.size(3), scale);
  return {by_position_of(weighed.values, q), {queries, keys, values, weighed.wide}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad_input, at::TensorList kept, std::int64_t groups, std::int64_t repeat,
    double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2], &wide = kept[3];
  const at::ScalarType dtype = queries.scalar_type();
  const std::int64_t rows = queries.size(0) / groups;
  const std::int64_t positions = queries.size(1) / repeat;
  const at::Tensor grad =
      joined_heads(grad_input.reshape({rows, positions, groups, repeat * values.size(2)})
                       .transpose(1, 2)
                       .reshape({rows, groups, positions * repeat, values.size(2)}));
  const at::Tensor grad_values = at::bmm(wide.to(dtype).transpose(1, 2), grad);
  const at::Tensor grad_weights = at::bmm(grad, values.transpose(1, 2)).to(wide.scalar_type());
  // What is behind a query has weight 0, so its score gets 0.
  const at::Tensor scores =
      at::_softmax_backward_data(grad_weights, wide, 2, wide.scalar_type()).to(dtype) * scale;
  const at::Tensor grad_queries = at::bmm(scores, keys);
  const at::Tensor grad_keys = at::bmm(queries.transpose(1, 2), scores).transpose(1, 2);
  return {grad_queries.reshape({rows, groups, positions, repeat, queries.size(2)}),
          grad_keys.reshape({rows, groups, positions, 1, keys.size(2)}),
          grad_values.view({rows, groups, positions, values.size(2)})
              .transpose(1, 2)
              .reshape({rows, positions, groups * values.size(2)})};
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  const at::Tensor queries =
      joined_heads(q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)}));
  return by_position_of(
      weigh(queries, joined_heads(keys), joined_heads(values), q.size(3), scale).values, q);
}

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares, std::int64_t first,
                    std::int64_t window, std::int64_t groups, std::int64_t repeat, double scale) {
  const std::int64_t queries = scores.size(1) / repeat;
  scores.mul_(scale)
      .view({scores.size(0), queries, repeat, scores.size(2)})
      .masked_fill_(outside_window(scores, queries, first, window), kNothing);
  at::Tensor log_sum = at::logsumexp(scores, {2}, /*keepdim=*/true);
  if (sinks) {
    const at::Tensor of_rows = sinks->view({1, groups, 1, repeat})
                                   .expand({scores.size(0) / groups, groups, queries, repeat})
                                   .reshape(log_sum.sizes());
    log_sum = at::logaddexp(log_sum, of_rows);
    shares->copy_(at::exp(of_rows - log_sum).squeeze(2));
  }
  scores.sub_(log_sum).exp_();
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares, std::int64_t /*first*/,
                             std::int64_t /*window*/, std::int64_t /*groups*/,
                             std::int64_t /*repeat*/, double scale) {
  const at::Tensor mean = (grad * weights).sum(2, /*keepdim=*/true);
  grad.sub_(mean).mul_(weights).mul_(scale);
  if (shares) shares->mul_(mean.squeeze(2)).neg_();
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  const std::int64_t groups = sum.numel() / repeat;
  sum.add_(rows.to(at::kDouble)
               .view({rows.size(0) / groups, groups, rows.size(1) / repeat, repeat})
               .sum(at::IntArrayRef({0, 2}))  // torch 2.11 has a form with names of dims, too
               .view(sum.sizes()));
}

}  // namespace tessera::kernels::aten
