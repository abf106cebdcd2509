#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "kernels/cpu/row_blocks.h"

namespace tessera::nn::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Forward into `y`, `sum` (undefined without a residual) and `scale`.
void run_forward(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                 double eps, const at::Tensor& sum, const at::Tensor& y, const at::Tensor& scale) {
  with_kernels(x.scalar_type(), weight.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    using W = typename decltype(types)::W;
    const NormForward<T, W> job{.x = data<T>(x),
                                .residual = data<T>(residual),
                                .weight = data<W>(weight),
                                .sum = mutable_data<T>(sum),
                                .y = mutable_data<T>(y),
                                .scale = mutable_data<float>(scale),
                                .columns = x.size(-1),
                                .eps = static_cast<float>(eps)};
    base::for_ranges(
        scale.numel(), rows_a_thread(job.columns),
        [&](std::int64_t begin, std::int64_t end) { kernels.norm_forward(job, begin, end); });
  });
}

/// Gradients of the normed tensor and of the weight (fp32, however narrow the weight is).
variable_list run_backward(const at::Tensor& grad, const at::Tensor& grad_sum, const at::Tensor& x,
                           const at::Tensor& weight, const at::Tensor& scale) {
  const at::Tensor grad_x = at::empty_like(x);
  RowBlocks blocks(scale.numel(), x.size(-1));
  with_kernels(x.scalar_type(), weight.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    using W = typename decltype(types)::W;
    const NormBackward<T, W> job{.grad = data<T>(grad),
                                 .grad_sum = data<T>(grad_sum),
                                 .x = data<T>(x),
                                 .weight = data<W>(weight),
                                 .scale = data<float>(scale),
                                 .grad_x = mutable_data<T>(grad_x),
                                 .grad_weight = nullptr,
                                 .columns = x.size(-1)};
    blocks.run([&](std::int64_t begin, std::int64_t end, float* sums) {
      NormBackward<T, W> part = job;
      part.grad_weight = sums;
      kernels.norm_backward(part, begin, end);
    });
  });
  return {grad_x, blocks.total()};
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            double eps) {
    const at::Tensor x = input.contiguous();
    const at::Tensor y = at::empty_like(x);
    const at::Tensor scale =
        at::empty(x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1)), at::kFloat);
    run_forward(x, {}, weight.contiguous(), eps, {}, y, scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, scale});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(3);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    variable_list result =
        run_backward(grads[0].contiguous(), {}, saved[0], saved[1].contiguous(), saved[2]);
    return {result[0], result[1], at::Tensor()};
  }
};

struct AddRmsNormFunction : torch::autograd::Function<AddRmsNormFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& residual, const at::Tensor& weight, double eps) {
    const at::Tensor x = input.contiguous();
    const at::Tensor sum = at::empty_like(x);
    const at::Tensor y = at::empty_like(x);
    const at::Tensor scale =
        at::empty(x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1)), at::kFloat);
    run_forward(x, residual.contiguous(), weight.contiguous(), eps, sum, y, scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({sum, weight, scale});
    return {sum, y};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    // [Note: left-out results] Without a gradient of the norm its weight gets none, and the sum's
    // goes on as it is.
    if (!grads[1].defined()) return {grads[0], grads[0], at::Tensor(), at::Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor grad_sum = grads[0].defined() ? grads[0].contiguous() : at::Tensor();
    const variable_list result =
        run_backward(grads[1].contiguous(), grad_sum, saved[0], saved[1].contiguous(), saved[2]);
    return {result[0], result[0], result[1], at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return RmsNormFunction::apply(x, weight, eps);
}

SumAndNorm add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                        double eps) {
  const variable_list result = AddRmsNormFunction::apply(x, residual, weight, eps);
  return {result[0], result[1]};
}

}  // namespace tessera::nn::cpu
