// Attention by blocks of queries, each with whole rows of scores, which backward computes again;
// and the softmax of a block with a window.
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "kernels/implementations.h"
#include "kernels/seen_blocks.h"
#include "tessera/wide_scope.h"

namespace tessera::kernels::aten {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

/// G key/value heads, R query heads of each; the first query's position among the keys.
struct Heads {
  std::int64_t groups, repeat, first = 0;
};

/// Attention by blocks of queries; queries [B*G, T*R, D], keys and values [B*G, N, D].
class Blockwise {
 public:
  Blockwise(const at::Tensor& queries, const at::Tensor& keys, const Heads& heads,
            const SeenKeys& seen, double scale)
      : sizes_{queries.size(0) / heads.groups, queries.size(1) / heads.repeat, keys.size(1),
               heads.first, kBlock},
        groups_(heads.groups),
        repeat_(heads.repeat),
        seen_(seen),
        scale_(scale) {}

  std::vector<SeenBlock> blocks() const { return seen_blocks(sizes_, seen_); }
  at::Tensor queries_of(const at::Tensor& x, const SeenBlock& block) const {
    return entries_of(x, block).narrow(1, block.queries.begin * repeat_,
                                       block.queries.size() * repeat_);
  }
  at::Tensor keys_of(const at::Tensor& x, const SeenBlock& block) const {
    return entries_of(x, block).narrow(1, block.keys.begin, block.keys.size());
  }

  /// Returns the weights of a block [., rows, keys], as wide as they are computed.
  at::Tensor weights(const at::Tensor& queries, const at::Tensor& keys,
                     const SeenBlock& block) const {
    const at::Tensor scores =
        at::bmm(queries_of(queries, block), keys_of(keys, block).transpose(1, 2)) * scale_;
    const WideScope softmax;
    const at::Tensor masked =
        scores.to(at::promote_types(queries.scalar_type(), at::kFloat))
            .view({block.rows.size(), groups_, block.queries.size(), repeat_, block.keys.size()})
            .masked_fill(hidden_keys(block, sizes_, seen_, queries.device()), kNothing);
    return at::softmax(masked, 4).view(scores.sizes());
  }

  /// Joins the blocks' results: [B*G, T*R, D'].
  at::Tensor joined(const std::vector<at::Tensor>& parts, const at::Tensor& like) const {
    if (parts.empty())
      return at::zeros({0, sizes_.queries * repeat_, like.size(2)}, like.options());
    const auto of_row = (sizes_.queries + kBlock - 1) / kBlock;
    std::vector<at::Tensor> rows;
    for (auto part = parts.begin(); part != parts.end(); part += of_row) {
      rows.push_back(of_row == 1 ? *part
                                 : at::cat(std::vector<at::Tensor>(part, part + of_row), 1));
    }
    return rows.size() == 1 ? rows.front() : at::cat(rows, 0);
  }

 private:
  static constexpr std::int64_t kBlock = 256;

  at::Tensor entries_of(const at::Tensor& x, const SeenBlock& block) const {
    return x.narrow(0, block.rows.begin * groups_, block.rows.size() * groups_);
  }

  SeenSizes sizes_;
  std::int64_t groups_, repeat_;
  SeenKeys seen_;
  double scale_;
};

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Blockwise& job) {
  std::vector<at::Tensor> parts;
  for (const SeenBlock& block : job.blocks()) {
    const at::Tensor weights = job.weights(queries, keys, block).to(queries.scalar_type());
    parts.push_back(at::bmm(weights, job.keys_of(values, block)));
  }
  return job.joined(parts, values);
}

struct Gradients {
  at::Tensor queries;       ///< [B*G, T*R, D]
  at::Tensor keys, values;  ///< [B*G, N, .], as wide as the weights are computed
};

/// grad [B*G, T*R, D'].
Gradients attend_backward(const at::Tensor& grad, const at::Tensor& queries, const at::Tensor& keys,
                          const at::Tensor& values, const Blockwise& job, double scale) {
  const at::ScalarType dtype = queries.scalar_type();
  const at::ScalarType inside = at::promote_types(dtype, at::kFloat);
  const auto zeros = [&](const at::Tensor& like) {
    return at::zeros(like.sizes(), like.options().dtype(inside));
  };
  const at::Tensor grad_keys = zeros(keys), grad_values = zeros(values);
  std::vector<at::Tensor> grad_queries;
  for (const SeenBlock& block : job.blocks()) {
    const at::Tensor wide = job.weights(queries, keys, block);
    const at::Tensor of_grad = job.queries_of(grad, block);
    job.keys_of(grad_values, block).add_(at::bmm(wide.to(dtype).transpose(1, 2), of_grad));
    const at::Tensor grad_weights =
        at::bmm(of_grad, job.keys_of(values, block).transpose(1, 2)).to(inside);
    // A query gives weight 0 to keys that it does not see, so their scores get 0.
    const at::Tensor scores =
        at::_softmax_backward_data(grad_weights, wide, 2, inside).to(dtype) * scale;
    grad_queries.push_back(at::bmm(scores, job.keys_of(keys, block)));
    job.keys_of(grad_keys, block)
        .add_(at::bmm(job.queries_of(queries, block).transpose(1, 2), scores).transpose(1, 2));
  }
  return {job.joined(grad_queries, queries), grad_keys, grad_values};
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

/// The inverse.
at::Tensor by_query_of(const at::Tensor& x, std::int64_t groups, std::int64_t repeat) {
  const std::int64_t head_dim = x.size(2) / (groups * repeat);
  return joined_heads(x.reshape({x.size(0), x.size(1), groups, repeat * head_dim})
                          .transpose(1, 2)
                          .reshape({x.size(0), groups, x.size(1) * repeat, head_dim}));
}

/// v [B, T, G*D'] -> [B*G, T, D'].
at::Tensor values_of(const at::Tensor& v, const at::Tensor& q) {
  const std::int64_t head_dim = v.size(2) / q.size(1);
  return joined_heads(v.reshape({q.size(0), q.size(2), q.size(1), head_dim}).transpose(1, 2));
}

/// Returns which of scores [B*G, Q*R, N] are hidden; begins and ends [B, Q] say what each of B rows
/// sees.
at::Tensor hidden_in_window(const at::Tensor& scores, const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t first,
                            std::int64_t window, std::int64_t queries, std::int64_t groups) {
  const std::int64_t rows = scores.size(0) / groups, keys = scores.size(2);
  return hidden_keys({{0, rows}, {0, queries}, {0, keys}}, {rows, queries, keys, first, queries},
                     {begins, ends, window}, scores.device());
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
  return std::get<0>(aten::causal_attention_forward(q, k, v, begins, ends, window, scale));
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t window, double scale) {
  const at::Tensor queries =
      joined_heads(q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)}));
  const at::Tensor keys = joined_heads(k.squeeze(3));
  const at::Tensor values = values_of(v, q);
  const Blockwise job(queries, keys, {q.size(1), q.size(3)}, {begins, ends, window}, scale);
  return {by_position_of(attend(queries, keys, values, job), q), {queries, keys, values}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad_input, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2];
  const at::ScalarType dtype = queries.scalar_type();
  const std::int64_t rows = queries.size(0) / groups;
  const std::int64_t positions = queries.size(1) / repeat;
  const Blockwise job(queries, keys, {groups, repeat}, {begins, ends, window}, scale);
  const Gradients of =
      attend_backward(by_query_of(grad_input, groups, repeat), queries, keys, values, job, scale);
  return {of.queries.reshape({rows, groups, positions, repeat, queries.size(2)}),
          of.keys.to(dtype).reshape({rows, groups, positions, 1, keys.size(2)}),
          of.values.to(dtype)
              .view({rows, groups, positions, values.size(2)})
              .transpose(1, 2)
              .reshape({rows, positions, groups * values.size(2)})};
}

std::tuple<at::Tensor, std::vector<at::Tensor>> part_attention_forward(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale) {
  const at::Tensor queries = joined_heads(q.flatten(2, 3)), all_keys = joined_heads(keys);
  const Blockwise job(queries, all_keys, {q.size(1), q.size(3), first}, {begins, ends, window},
                      scale);
  return {by_position_of(attend(queries, all_keys, joined_heads(values), job), q), {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> part_attention_backward(
    const at::Tensor& grad, const at::Tensor& /*result*/, const at::Tensor& q,
    const at::Tensor& keys, const at::Tensor& values, at::TensorList /*kept*/,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale) {
  const at::Tensor queries = joined_heads(q.flatten(2, 3)), all_keys = joined_heads(keys);
  const Blockwise job(queries, all_keys, {q.size(1), q.size(3), first}, {begins, ends, window},
                      scale);
  const Gradients of = attend_backward(by_query_of(grad, q.size(1), q.size(3)), queries, all_keys,
                                       joined_heads(values), job, scale);
  return {of.queries.view(q.sizes()), of.keys.view(keys.sizes()), of.values.view(values.sizes())};
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  const at::Tensor queries =
      joined_heads(q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)}));
  const at::Tensor all_keys = joined_heads(keys);
  const Blockwise job(queries, all_keys, {q.size(1), q.size(3), keys.size(2) - q.size(2)}, {},
                      scale);
  return by_position_of(attend(queries, all_keys, joined_heads(values), job), q);
}

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares,
                    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
                    std::int64_t first, std::int64_t window, std::int64_t groups,
                    std::int64_t repeat, double scale) {
  const std::int64_t queries = scores.size(1) / repeat, rows = scores.size(0) / groups;
  scores.mul_(scale)
      .view({rows, groups, queries, repeat, scores.size(2)})
      .masked_fill_(hidden_in_window(scores, begins, ends, first, window, queries, groups),
                    kNothing);
  at::Tensor log_sum = at::logsumexp(scores, {2}, /*keepdim=*/true);
  if (sinks) {
    const at::Tensor of_rows = sinks->view({1, groups, 1, repeat})
                                   .expand({rows, groups, queries, repeat})
                                   .reshape(log_sum.sizes());
    log_sum = at::logaddexp(log_sum, of_rows);
    if (shares) shares->copy_(at::exp(of_rows - log_sum).squeeze(2));
  }
  scores.sub_(log_sum).exp_();
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares,
                             const std::optional<at::Tensor>& /*begins*/,
                             const std::optional<at::Tensor>& /*ends*/, std::int64_t /*first*/,
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
