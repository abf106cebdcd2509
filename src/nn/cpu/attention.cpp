// Plain products around a fused softmax: at the lengths that one rank trains this is faster than a
// flash kernel, and the products take whatever matrix units the machine has.
#include <ATen/ops/bmm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/cpu/dispatch.h"
#include "nn/cpu/functions.h"
#include "nn/cpu/parallel.h"

namespace tessera::nn::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// B rows, G key/value heads, T positions, R query heads of each, D head_dim.
struct Sizes {
  explicit Sizes(const at::Tensor& q)
      : rows(q.size(0)),
        groups(q.size(1)),
        positions(q.size(2)),
        repeat(q.size(3)),
        head_dim(q.size(4)) {}
  std::int64_t rows, groups, positions, repeat, head_dim;
};

/// [B, T, G*n*D] -> [B*G, T*n, D], a copy.
at::Tensor by_group(const at::Tensor& x, const Sizes& sizes, std::int64_t n) {
  return x.view({sizes.rows, sizes.positions, sizes.groups, n * sizes.head_dim})
      .transpose(1, 2)
      .contiguous()
      .view({sizes.rows * sizes.groups, sizes.positions * n, sizes.head_dim});
}

/// The inverse of by_group.
at::Tensor by_position(const at::Tensor& x, const Sizes& sizes, std::int64_t n) {
  return x.view({sizes.rows, sizes.groups, sizes.positions, n * sizes.head_dim})
      .transpose(1, 2)
      .contiguous()
      .view({sizes.rows, sizes.positions, sizes.groups * n * sizes.head_dim});
}

/// [B, G, T, n, D] -> [B*G, T*n, D], a view.
at::Tensor flat(const at::Tensor& x) {
  return x.view({x.size(0) * x.size(1), x.size(2) * x.size(3), x.size(4)});
}

/// Softmax of the rows of `scores` [B*G, T*R, T] in place; with `weights` its backward.
void softmax_in_place(const at::Tensor& scores, const at::Tensor& weights, const Sizes& sizes,
                      double scale) {
  with_kernels(scores.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    const CausalRows<T> job{.scores = mutable_data<T>(scores),
                            .weights = data<T>(weights),
                            .keys = sizes.positions,
                            .first = 0,
                            .repeat = sizes.repeat,
                            .period = sizes.positions * sizes.repeat,
                            .scale = static_cast<float>(scale)};
    const auto kernel =
        weights.defined() ? kernels.causal_softmax_backward : kernels.causal_softmax;
    for_ranges(scores.size(0) * scores.size(1), rows_a_thread(sizes.positions),
               [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
  });
}

struct CausalAttentionFunction : torch::autograd::Function<CausalAttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, double scale) {
    const Sizes sizes(q);
    const at::Tensor queries = flat(q.contiguous());
    const at::Tensor keys = flat(k.contiguous());
    const at::Tensor values = by_group(v.contiguous(), sizes, 1);
    const at::Tensor weights = at::bmm(queries, keys.transpose(1, 2));
    softmax_in_place(weights, {}, sizes, scale);
    ctx->save_for_backward({queries, keys, values, weights});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["groups"] = sizes.groups;
    ctx->saved_data["repeat"] = sizes.repeat;
    return by_position(at::bmm(weights, values), sizes, sizes.repeat);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& queries = saved[0];
    const at::Tensor& keys = saved[1];
    const at::Tensor& values = saved[2];
    const at::Tensor& weights = saved[3];
    const std::int64_t groups = ctx->saved_data["groups"].toInt();
    const std::int64_t repeat = ctx->saved_data["repeat"].toInt();
    const at::Tensor turned_q = queries.view(
        {queries.size(0) / groups, groups, queries.size(1) / repeat, repeat, queries.size(2)});
    const Sizes sizes(turned_q);
    const at::Tensor grad = by_group(grads[0].contiguous(), sizes, repeat);
    const at::Tensor grad_values = at::bmm(weights.transpose(1, 2), grad);
    const at::Tensor grad_scores = at::bmm(grad, values.transpose(1, 2));
    softmax_in_place(grad_scores, weights, sizes, ctx->saved_data["scale"].toDouble());
    const at::Tensor grad_queries = at::bmm(grad_scores, keys);
    const at::Tensor grad_keys = at::bmm(grad_scores.transpose(1, 2), queries);
    return {grad_queries.view(turned_q.sizes()),
            grad_keys.view({sizes.rows, groups, sizes.positions, 1, sizes.head_dim}),
            by_position(grad_values, sizes, 1), at::Tensor()};
  }
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return CausalAttentionFunction::apply(q, k, v, scale);
}

}  // namespace tessera::nn::cpu
