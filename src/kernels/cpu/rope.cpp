#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "kernels/cpu/row_blocks.h"

namespace tessera::nn::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RopeHeadsFunction : torch::autograd::Function<RopeHeadsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& norm_weight, const at::Tensor& cos,
                            const at::Tensor& sin, std::int64_t heads, std::int64_t repeat,
                            double eps) {
    const at::Tensor x = input.contiguous();
    const at::Tensor weight = norm_weight.value_or(at::Tensor());
    const std::int64_t head_dim = x.size(2) / heads;
    const at::Tensor y =
        at::empty({x.size(0), heads / repeat, x.size(1), repeat, head_dim}, x.options());
    const at::Tensor scale =
        weight.defined() ? at::empty({x.size(0) * x.size(1), heads}, at::kFloat) : at::Tensor();
    const at::Tensor factors = weight.defined() ? weight.contiguous() : weight;
    with_kernels(x.scalar_type(), weight.defined() ? weight.scalar_type() : x.scalar_type(),
                 [&](auto types, const auto& kernels) {
                   using T = typename decltype(types)::T;
                   using W = typename decltype(types)::W;
                   const HeadsForward<T, W> job{.x = data<T>(x),
                                                .weight = data<W>(factors),
                                                .cos = data<T>(cos),
                                                .sin = data<T>(sin),
                                                .y = mutable_data<T>(y),
                                                .scale = mutable_data<float>(scale),
                                                .positions = x.size(1),
                                                .heads = heads,
                                                .repeat = repeat,
                                                .head_dim = head_dim,
                                                .eps = static_cast<float>(eps)};
                   base::for_ranges(x.size(0) * x.size(1), rows_a_thread(x.size(2)),
                                    [&](std::int64_t begin, std::int64_t end) {
                                      kernels.heads_forward(job, begin, end);
                                    });
                 });
    ctx->set_materialize_grads(false);
    // Without a norm the gradient does not depend on x.
    ctx->save_for_backward({weight.defined() ? x : at::Tensor(), weight, cos, sin, scale});
    ctx->saved_data["repeat"] = repeat;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(7);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& weight = saved[1];
    const at::Tensor grad = grads[0].contiguous();  // [B, G, T, R, D]
    const std::int64_t repeat = ctx->saved_data["repeat"].toInt();
    const std::int64_t heads = grad.size(1) * repeat;
    const std::int64_t head_dim = grad.size(4);
    const std::int64_t tokens = grad.size(0) * grad.size(2);
    const at::Tensor grad_x =
        at::empty({grad.size(0), grad.size(2), heads * head_dim}, grad.options());
    const at::Tensor factors = weight.defined() ? weight.contiguous() : weight;
    RowBlocks blocks(tokens, weight.defined() ? head_dim : 0);
    with_kernels(grad.scalar_type(), weight.defined() ? weight.scalar_type() : grad.scalar_type(),
                 [&](auto types, const auto& kernels) {
                   using T = typename decltype(types)::T;
                   using W = typename decltype(types)::W;
                   const HeadsBackward<T, W> job{.grad = data<T>(grad),
                                                 .x = data<T>(saved[0]),
                                                 .weight = data<W>(factors),
                                                 .cos = data<T>(saved[2]),
                                                 .sin = data<T>(saved[3]),
                                                 .scale = data<float>(saved[4]),
                                                 .grad_x = mutable_data<T>(grad_x),
                                                 .grad_weight = nullptr,
                                                 .positions = grad.size(2),
                                                 .heads = heads,
                                                 .repeat = repeat,
                                                 .head_dim = head_dim};
                   blocks.run([&](std::int64_t begin, std::int64_t end, float* sums) {
                     HeadsBackward<T, W> part = job;
                     part.grad_weight = sums;
                     kernels.heads_backward(part, begin, end);
                   });
                 });
    const at::Tensor none;
    return {grad_x, weight.defined() ? blocks.total() : none, none, none, none, none, none};
  }
};

}  // namespace

at::Tensor rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                      const RopeTable& table) {
  const std::optional<at::Tensor> weight =
      norm.weight.defined() ? std::optional(norm.weight) : std::nullopt;
  return RopeHeadsFunction::apply(x, weight, table.cos, table.sin, layout.heads, layout.repeat,
                                  norm.eps);
}

}  // namespace tessera::nn::cpu
