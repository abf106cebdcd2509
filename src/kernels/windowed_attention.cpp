// Attention with windows and sinks, for every device: products of blocks of queries with the keys
// that they see, around window_softmax. fp32 inside (fp64 for fp64). Backward needs only the
// inputs: it computes the weights of a block again, one more product.
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/operations.h"
#include "kernels/results.h"
#include "kernels/seen_blocks.h"

namespace tessera::kernels {
namespace {

/// Widens the whole [B, G, N, D] -> [B*G, N, D] in `dtype`.
at::Tensor widened(const at::Tensor& x, at::ScalarType dtype) {
  return x.to(dtype, /*non_blocking=*/false, /*copy=*/false, at::MemoryFormat::Contiguous)
      .reshape({x.size(0) * x.size(1), x.size(2), x.size(3)});
}

/// The operations of both passes on a block, whose queries are rows of [B*G, block*R, D].
class Windowed {
 public:
  Windowed(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
           const std::optional<at::Tensor>& sinks, SeenKeys seen, std::int64_t first, double scale)
      : rows(q.size(0)),
        groups(q.size(1)),
        queries(q.size(2)),
        repeat(q.size(3)),
        inside(at::promote_types(q.scalar_type(), at::kFloat)),
        q_(q),
        keys_(widened(keys, inside)),
        values_(widened(values, inside)),
        seen_(std::move(seen)),
        first_(first),
        scale_(scale) {
    if (sinks) sinks_ = sinks->to(inside).contiguous();
  }

  std::vector<SeenBlock> blocks() const {
    // Half of a block's scores lie outside a window of its length, so short windows have shorter
    // blocks: 64, 128 or 256, so that parts of a row which are multiples of these have its blocks.
    const bool shorter = seen_.begins || seen_.window < 256;
    const std::int64_t block = seen_.window < 128 ? 64 : shorter ? 128 : 256;
    return seen_blocks({rows, queries, keys_.size(1), first_, block}, seen_);
  }

  at::Tensor rows_of(const at::Tensor& x, const SeenBlock& block) const {
    return x.narrow(0, block.rows.begin, block.rows.size())
        .narrow(2, block.queries.begin, block.queries.size())
        .to(inside)
        .reshape({block.rows.size() * groups, block.queries.size() * repeat, x.size(4)});
  }
  /// The inverse for a view of `x`.
  void set_rows(const at::Tensor& x, const SeenBlock& block, const at::Tensor& values) const {
    x.narrow(0, block.rows.begin, block.rows.size())
        .narrow(2, block.queries.begin, block.queries.size())
        .copy_(values.view({block.rows.size(), groups, block.queries.size(), repeat, x.size(4)}));
  }
  at::Tensor queries_of(const SeenBlock& block) const { return rows_of(q_, block); }
  at::Tensor keys_of(const SeenBlock& block) const { return part(keys_, block); }
  at::Tensor values_of(const SeenBlock& block) const { return part(values_, block); }
  /// Returns the block's keys of x [B*G, N, .].
  at::Tensor part(const at::Tensor& x, const SeenBlock& block) const {
    return x.narrow(0, block.rows.begin * groups, block.rows.size() * groups)
        .narrow(1, block.keys.begin, block.keys.size());
  }

  /// Returns [rows * G, block*R] for the sinks' part of each row.
  at::Tensor shares(const SeenBlock& block) const {
    return at::empty({block.rows.size() * groups, block.queries.size() * repeat}, keys_.options());
  }

  /// Computes the softmax of scaled scores [rows * G, block*R, keys] in place, and the sinks' part
  /// of it where that is requested.
  void softmax(const at::Tensor& scores, const std::optional<at::Tensor>& shares,
               const SeenBlock& block) const {
    window_softmax(scores, sinks_, shares, among_keys(seen_.begins, block),
                   among_keys(seen_.ends, block), first_key(block), seen_.window, groups, repeat,
                   scale_);
  }

  /// Turns the gradient of weights into that of scores, in place; shares become the gradients of
  /// the rows' sinks.
  void softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                        const std::optional<at::Tensor>& shares, const SeenBlock& block) const {
    window_softmax_backward(grad, weights, shares, among_keys(seen_.begins, block),
                            among_keys(seen_.ends, block), first_key(block), seen_.window, groups,
                            repeat, scale_);
  }

  const std::int64_t rows, groups, queries, repeat;
  const at::ScalarType inside;

 private:
  /// Returns the position of the first query among the keys that the block sees.
  std::int64_t first_key(const SeenBlock& block) const {
    return first_ + block.queries.begin - block.keys.begin;
  }
  /// Returns the block's part of [B, T] key numbers, counted from its first key.
  static std::optional<at::Tensor> among_keys(const std::optional<at::Tensor>& all,
                                              const SeenBlock& block) {
    if (!all) return std::nullopt;
    return (all->narrow(0, block.rows.begin, block.rows.size())
                .narrow(1, block.queries.begin, block.queries.size()) -
            block.keys.begin)
        .contiguous();
  }

  at::Tensor q_, keys_, values_;
  std::optional<at::Tensor> sinks_;
  SeenKeys seen_;
  std::int64_t first_;
  double scale_;
};

/// [B, T, G*R*D] as [B, G, T, R, D].
at::Tensor turned(const at::Tensor& x, const Windowed& job) {
  return x
      .view({job.rows, job.queries, job.groups, job.repeat, x.size(2) / (job.groups * job.repeat)})
      .transpose(1, 2);
}

}  // namespace

at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const std::optional<at::Tensor>& sinks,
                              const std::optional<at::Tensor>& begins,
                              const std::optional<at::Tensor>& ends, std::int64_t first,
                              std::int64_t window, double scale) {
  TESSERA_WATCHED(windowed_attention, q, keys, values, sinks, begins, ends, first, window, scale);
  const Windowed job(q, keys, values, sinks, {begins, ends, window}, first, scale);
  const at::Tensor mixed =
      result({job.rows, job.queries, job.groups * job.repeat * values.size(3)}, q.options());
  const at::Tensor by_group = turned(mixed, job);
  for (const SeenBlock& block : job.blocks()) {
    const at::Tensor weights = at::bmm(job.queries_of(block), job.keys_of(block).transpose(1, 2));
    job.softmax(weights, std::nullopt, block);
    job.set_rows(by_group, block, at::bmm(weights, job.values_of(block)));
  }
  return mixed;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> windowed_attention_backward(
    const at::Tensor& grad_input, const at::Tensor& q, const at::Tensor& keys,
    const at::Tensor& values, const std::optional<at::Tensor>& sinks,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale, bool of_sinks) {
  TESSERA_WATCHED(windowed_attention_backward, grad_input, q, keys, values, sinks, begins, ends,
                  first, window, scale, of_sinks);
  const Windowed job(q, keys, values, sinks, {begins, ends, window}, first, scale);
  const at::Tensor grad = turned(grad_input.contiguous(), job);
  const at::Tensor grad_q = result(q.sizes(), q.options());
  const auto zeros = [&](const at::Tensor& like) {
    return at::zeros({job.rows * job.groups, like.size(2), like.size(3)},
                     like.options().dtype(job.inside));
  };
  const at::Tensor grad_keys = zeros(keys), grad_values = zeros(values);
  std::optional<at::Tensor> grad_sinks;
  if (sinks && of_sinks) {
    grad_sinks = at::zeros({job.groups * job.repeat}, q.options().dtype(at::kDouble));
  }
  for (const SeenBlock& block : job.blocks()) {
    const at::Tensor queries = job.queries_of(block);
    const std::optional<at::Tensor> shares =
        grad_sinks ? std::make_optional(job.shares(block)) : std::nullopt;
    const at::Tensor weights = at::bmm(queries, job.keys_of(block).transpose(1, 2));
    job.softmax(weights, shares, block);
    const at::Tensor block_grad = job.rows_of(grad, block);
    job.part(grad_values, block).add_(at::bmm(weights.transpose(1, 2), block_grad));
    const at::Tensor scores = at::bmm(block_grad, job.values_of(block).transpose(1, 2));
    job.softmax_backward(scores, weights, shares, block);
    job.set_rows(grad_q, block, at::bmm(scores, job.keys_of(block)));
    job.part(grad_keys, block).add_(at::bmm(scores.transpose(1, 2), queries));
    if (shares) add_sink_gradients(*shares, *grad_sinks, job.repeat);
  }
  return {grad_q, grad_keys.view(keys.sizes()), grad_values.view(values.sizes()),
          grad_sinks ? grad_sinks->to(job.inside) : at::Tensor()};
}

}  // namespace tessera::kernels
