#include "nn/masked_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/first_derivative.h"
#include "kernels/kernels.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Windows: fp32 inside (fp64 of fp64); what backward needs is the inputs alone. The weights of a
// block of queries are formed again there, one product more, so that nothing of the size of queries
// times keys is kept.

/// Queries [begin, end) and the keys [from, seen) that any of them sees.
struct WindowedBlock {
  std::int64_t begin, end, from, seen;
  std::int64_t queries() const { return end - begin; }
  std::int64_t keys() const { return seen - from; }
};

/// Whole, [B, G, N, D] -> [B*G, N, D] in `dtype`.
at::Tensor widened(const at::Tensor& x, at::ScalarType dtype) {
  return x.to(dtype, /*non_blocking=*/false, /*copy=*/false, at::MemoryFormat::Contiguous)
      .reshape({x.size(0) * x.size(1), x.size(2), x.size(3)});
}

/// What both passes do with a block. Its queries are rows of [B*G, block*R, D].
class Windowed {
 public:
  Windowed(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
           const AttentionMask& mask, double scale)
      : rows(q.size(0)),
        groups(q.size(1)),
        queries(q.size(2)),
        repeat(q.size(3)),
        inside(at::promote_types(q.scalar_type(), at::kFloat)),
        q_(q),
        keys_(widened(keys, inside)),
        values_(widened(values, inside)),
        window_(mask.window.value_or(std::numeric_limits<std::int64_t>::max())),
        scale_(scale) {
    if (mask.sinks.defined()) sinks_ = mask.sinks.to(inside).contiguous();
  }

  std::vector<WindowedBlock> blocks() const {
    // Half of a block's scores lie outside a window of its length: shorter blocks for short ones.
    const std::int64_t size = std::clamp<std::int64_t>(window_, 64, 256);
    std::vector<WindowedBlock> result;
    for (std::int64_t begin = 0; begin < queries; begin += size) {
      const std::int64_t end = std::min(begin + size, queries);
      const std::int64_t own = position(begin) + 1;
      result.push_back({begin, end, own > window_ ? own - window_ : 0, position(end)});
    }
    return result;
  }

  at::Tensor rows_of(const at::Tensor& x, const WindowedBlock& block) const {
    return x.narrow(2, block.begin, block.queries())
        .to(inside)
        .reshape({rows * groups, block.queries() * repeat, x.size(4)});
  }
  /// The inverse for a view of `x`.
  void set_rows(const at::Tensor& x, const WindowedBlock& block, const at::Tensor& values) const {
    x.narrow(2, block.begin, block.queries())
        .copy_(values.view({rows, groups, block.queries(), repeat, x.size(4)}));
  }
  at::Tensor queries_of(const WindowedBlock& block) const { return rows_of(q_, block); }
  at::Tensor keys_of(const WindowedBlock& block) const { return part(keys_, block); }
  at::Tensor values_of(const WindowedBlock& block) const { return part(values_, block); }
  static at::Tensor part(const at::Tensor& x, const WindowedBlock& block) {
    return x.narrow(1, block.from, block.keys());
  }

  /// [B*G, block*R] for the sinks' part of each row, undefined without sinks.
  at::Tensor shares(const WindowedBlock& block) const {
    return sinks_.defined() ? at::empty({rows * groups, block.queries() * repeat}, keys_.options())
                            : at::Tensor();
  }

  /// The softmax of scaled scores [B*G, block*R, keys] in place, and the sinks' part of it.
  void softmax(const at::Tensor& scores, const at::Tensor& shares,
               const WindowedBlock& block) const {
    kernels::window_softmax(scores, given(sinks_), given(shares), first_key(block), window_, groups,
                            repeat, scale_);
  }

  /// From the gradient of weights to that of scores, in place; shares become the gradients of the
  /// rows' sinks.
  void softmax_backward(const at::Tensor& grad, const at::Tensor& weights, const at::Tensor& shares,
                        const WindowedBlock& block) const {
    kernels::window_softmax_backward(grad, weights, given(shares), first_key(block), window_,
                                     groups, repeat, scale_);
  }

  const std::int64_t rows, groups, queries, repeat;
  const at::ScalarType inside;

 private:
  /// Of a query among the keys.
  std::int64_t position(std::int64_t query) const { return keys_.size(1) - queries + query; }

  /// Where the first query stands among the keys that the block sees.
  std::int64_t first_key(const WindowedBlock& block) const {
    return position(block.begin) - block.from;
  }
  static std::optional<at::Tensor> given(const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  }

  at::Tensor q_, keys_, values_, sinks_;
  std::int64_t window_;
  double scale_;
};

/// [B, T, G*R*D] as [B, G, T, R, D].
at::Tensor turned(const at::Tensor& x, const Windowed& job) {
  return x
      .view({job.rows, job.queries, job.groups, job.repeat, x.size(2) / (job.groups * job.repeat)})
      .transpose(1, 2);
}

at::Tensor attend_windowed(const Windowed& job, const at::Tensor& q, std::int64_t head_dim) {
  const at::Tensor result =
      at::empty({job.rows, job.queries, job.groups * job.repeat * head_dim}, q.options());
  const at::Tensor by_group = turned(result, job);
  for (const WindowedBlock& block : job.blocks()) {
    const at::Tensor weights = at::bmm(job.queries_of(block), job.keys_of(block).transpose(1, 2));
    job.softmax(weights, job.shares(block), block);
    job.set_rows(by_group, block, at::bmm(weights, job.values_of(block)));
  }
  return result;
}

struct WindowedAttentionFunction : torch::autograd::Function<WindowedAttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& keys,
                            const at::Tensor& values, const std::optional<at::Tensor>& given,
                            std::optional<std::int64_t> window, double scale) {
    const at::Tensor sinks = given.value_or(at::Tensor());
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, keys, values, sinks});
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    return attend_windowed(Windowed(q, keys, values, {window, sinks}, scale), q, values.size(3));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &keys = saved[1], &values = saved[2], &sinks = saved[3];
    const Windowed job(q, keys, values,
                       {ctx->saved_data["window"].toOptional<std::int64_t>(), sinks},
                       ctx->saved_data["scale"].toDouble());
    const at::Tensor grad = turned(grads[0].contiguous(), job);
    const at::Tensor grad_q = at::empty(q.sizes(), q.options());
    const auto zeros = [&](const at::Tensor& like) {
      return at::zeros({job.rows * job.groups, like.size(2), like.size(3)},
                       like.options().dtype(job.inside));
    };
    const at::Tensor grad_keys = zeros(keys), grad_values = zeros(values);
    const at::Tensor grad_sinks =
        at::zeros({job.groups * job.repeat}, q.options().dtype(at::kDouble));
    for (const WindowedBlock& block : job.blocks()) {
      const at::Tensor queries = job.queries_of(block);
      const at::Tensor shares = job.shares(block);
      const at::Tensor weights = at::bmm(queries, job.keys_of(block).transpose(1, 2));
      job.softmax(weights, shares, block);
      const at::Tensor block_grad = job.rows_of(grad, block);
      Windowed::part(grad_values, block).add_(at::bmm(weights.transpose(1, 2), block_grad));
      const at::Tensor scores = at::bmm(block_grad, job.values_of(block).transpose(1, 2));
      job.softmax_backward(scores, weights, shares, block);
      job.set_rows(grad_q, block, at::bmm(scores, job.keys_of(block)));
      Windowed::part(grad_keys, block).add_(at::bmm(scores.transpose(1, 2), queries));
      if (shares.defined()) kernels::add_sink_gradients(shares, grad_sinks, job.repeat);
    }
    return {grad_q, grad_keys.view(keys.sizes()).to(keys.scalar_type()),
            grad_values.view(values.sizes()).to(values.scalar_type()),
            // As wide as the computation, however narrow the sinks are.
            sinks.defined() ? grad_sinks.to(job.inside) : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor attention_composite(const at::Tensor& q, const at::Tensor& keys,
                               const at::Tensor& values, const MaskedKeys& masked_keys,
                               double scale) {
  const std::int64_t rows = q.size(0);
  const std::int64_t groups = q.size(1);
  const std::int64_t positions = q.size(2);
  const std::int64_t repeat = q.size(3);
  const std::int64_t head_dim = q.size(4);
  const std::int64_t seen = keys.size(2);
  const at::Tensor queries = q.reshape({rows, groups, positions * repeat, head_dim});
  const at::Tensor scores = at::matmul(queries, keys.transpose(2, 3)) * scale;
  const at::ScalarType inside = at::promote_types(q.scalar_type(), at::kFloat);
  const at::Tensor weights = [&] {
    const WideScope softmax;
    const at::Tensor masked =
        scores.to(inside)
            .view({rows, groups, positions, repeat, seen})
            .masked_fill(masked_keys.hidden, -std::numeric_limits<double>::infinity());
    if (!masked_keys.sinks.defined()) return at::softmax(masked, 4).to(q.scalar_type());
    const at::Tensor sinks = masked_keys.sinks.to(inside)
                                 .view({1, groups, 1, repeat, 1})
                                 .expand({rows, groups, positions, repeat, 1});
    return at::softmax(at::cat({masked, sinks}, 4), 4).narrow(4, 0, seen).to(q.scalar_type());
  }();
  return at::matmul(weights.reshape({rows, groups, positions * repeat, seen}), values)
      .view({rows, groups, positions, repeat * values.size(3)})
      .transpose(1, 2)
      .reshape({rows, positions, groups * repeat * values.size(3)});
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& visible, double scale) {
  const at::Tensor values = v.reshape({q.size(0), q.size(2), q.size(1), q.size(4)}).transpose(1, 2);
  return attention_composite(q, k.squeeze(3), values,
                             {.hidden = visible.logical_not().unsqueeze(1).unsqueeze(3)}, scale);
}

at::Tensor number_runs(const at::Tensor& flags) {
  if (flags.size(1) == 0) return flags.to(at::kLong);
  const at::Tensor before =
      at::cat({at::zeros_like(flags.narrow(1, 0, 1)), flags.narrow(1, 0, flags.size(1) - 1)}, 1);
  const at::Tensor begins = flags.logical_and(before.logical_not());
  const at::Tensor numbers = at::cumsum(begins.to(at::kLong), 1) - 1;
  return numbers.masked_fill(flags.logical_not(), -1);
}

at::Tensor sliding_visibility(std::int64_t positions, std::int64_t window,
                              const std::optional<at::Tensor>& blocks, at::Device device) {
  const at::Tensor position = at::arange(
      positions, blocks ? blocks->options() : at::TensorOptions(at::kLong).device(device));
  const at::Tensor query = position.unsqueeze(1);
  const at::Tensor key = position.unsqueeze(0);
  at::Tensor seen = (key <= query).unsqueeze(0);
  if (blocks) {
    const at::Tensor of_query = blocks->unsqueeze(2);
    seen = seen.logical_or((of_query == blocks->unsqueeze(1)).logical_and(of_query >= 0));
  }
  return seen.logical_and(key > query - window);
}

at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionMask& mask, double scale) {
  const WideScope inside;
  // Autograd takes no undefined tensor for a variable.
  const std::optional<at::Tensor> sinks =
      mask.sinks.defined() ? std::optional(mask.sinks) : std::nullopt;
  return WindowedAttentionFunction::apply(q, keys, values, sinks, mask.window, scale);
}

}  // namespace tessera::nn
