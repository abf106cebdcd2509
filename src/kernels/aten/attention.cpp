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

/// Attention by blocks of queries; queries [B*G, T*R, D], keys and values [B*G, N, D].
class Blockwise {
 public:
  Blockwise(const at::Tensor& queries, const at::Tensor& keys, std::int64_t groups,
            std::int64_t repeat, const SeenKeys& seen, double scale)
      : sizes_{queries.size(0) / groups, queries.size(1) / repeat, keys.size(1), kBlock},
        groups_(groups),
        repeat_(repeat),
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

/// Returns which of scores [B*G, Q*R, N] are hidden; begins and ends [B, Q] say what each of B rows
/// sees.
at::Tensor hidden_in_window(const at::Tensor& scores, const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t first,
                            std::int64_t window, std::int64_t queries, std::int64_t groups) {
  // The first query is at position `first`: so many keys have no query.
  const std::int64_t keys = first + queries, rows = scores.size(0) / groups;
  const SeenBlock block{{0, rows}, {0, queries}, {0, scores.size(2)}};
  return hidden_keys(block, {rows, queries, keys, queries}, {begins, ends, window},
                     scores.device());
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
  const Blockwise job(queries, keys, q.size(1), q.size(3), {begins, ends, window}, scale);
  return {by_position_of(attend(queries, keys, values, job), q), {queries, keys, values}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad_input, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2];
  const at::ScalarType dtype = queries.scalar_type();
  const at::ScalarType inside = at::promote_types(dtype, at::kFloat);
  const std::int64_t rows = queries.size(0) / groups;
  const std::int64_t positions = queries.size(1) / repeat;
  const at::Tensor grad =
      joined_heads(grad_input.reshape({rows, positions, groups, repeat * values.size(2)})
                       .transpose(1, 2)
                       .reshape({rows, groups, positions * repeat, values.size(2)}));
  const auto zeros = [&](const at::Tensor& like) {
    return at::zeros(like.sizes(), like.options().dtype(inside));
  };
  const at::Tensor grad_keys = zeros(keys), grad_values = zeros(values);
  std::vector<at::Tensor> grad_queries;
  const Blockwise job(queries, keys, groups, repeat, {begins, ends, window}, scale);
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
  return {
      job.joined(grad_queries, queries).reshape({rows, groups, positions, repeat, queries.size(2)}),
      grad_keys.to(dtype).reshape({rows, groups, positions, 1, keys.size(2)}),
      grad_values.to(dtype)
          .view({rows, groups, positions, values.size(2)})
          .transpose(1, 2)
          .reshape({rows, positions, groups * values.size(2)})};
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  const at::Tensor queries =
      joined_heads(q.reshape({q.size(0), q.size(1), q.size(2) * q.size(3), q.size(4)}));
  const at::Tensor all_keys = joined_heads(keys);
  const Blockwise job(queries, all_keys, q.size(1), q.size(3), {}, scale);
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
