#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/row_blocks.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
namespace {

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

/// [...] of x [..., K].
at::Tensor empty_scale(const at::Tensor& x) {
  return at::empty(x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1)), at::kFloat);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, const at::Tensor& weight,
                                            double eps, bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor y = at::empty_like(x);
  const at::Tensor scale = empty_scale(x);
  run_forward(x, {}, weight.contiguous(), eps, {}, y, scale);
  return {y, scale};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor sum = at::empty_like(x);
  const at::Tensor y = at::empty_like(x);
  const at::Tensor scale = empty_scale(x);
  run_forward(x, residual.contiguous(), weight.contiguous(), eps, sum, y, scale);
  return {sum, y, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_input,
                                                     const std::optional<at::Tensor>& grad_of_sum,
                                                     const at::Tensor& input,
                                                     const at::Tensor& weight_input,
                                                     const at::Tensor& scale,
                                                     bool /*rounds_first*/) {
  const at::Tensor grad = grad_input.contiguous();
  const at::Tensor grad_sum = contiguous_or_none(grad_of_sum);
  const at::Tensor x = input.contiguous();
  const at::Tensor weight = weight_input.contiguous();
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

}  // namespace tessera::kernels::cpu
