#include <ATen/ops/empty.h>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/row_blocks.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& input,
                                              const std::optional<at::Tensor>& norm_weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor weight = contiguous_or_none(norm_weight);
  const std::int64_t head_dim = x.size(2) / heads;
  const at::Tensor y =
      at::empty({x.size(0), heads / repeat, x.size(1), repeat, head_dim}, x.options());
  const at::Tensor scale =
      weight.defined() ? at::empty({x.size(0) * x.size(1), heads}, at::kFloat) : at::Tensor();
  with_kernels(x.scalar_type(), weight.defined() ? weight.scalar_type() : x.scalar_type(),
               [&](auto types, const auto& kernels) {
                 using T = typename decltype(types)::T;
                 using W = typename decltype(types)::W;
                 const HeadsForward<T, W> job{.x = data<T>(x),
                                              .weight = data<W>(weight),
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
  return {y, scale};
}

std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad_input,
                                                       const std::optional<at::Tensor>& normed,
                                                       const std::optional<at::Tensor>& norm_weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& norm_scale,
                                                       bool /*rounds_first*/) {
  const at::Tensor grad = grad_input.contiguous();  // [B, G, T, R, D]
  const at::Tensor weight = contiguous_or_none(norm_weight);
  const at::Tensor x = contiguous_or_none(normed);
  const at::Tensor scale = contiguous_or_none(norm_scale);
  const std::int64_t repeat = grad.size(3);
  const std::int64_t heads = grad.size(1) * repeat;
  const std::int64_t head_dim = grad.size(4);
  const at::Tensor grad_x =
      at::empty({grad.size(0), grad.size(2), heads * head_dim}, grad.options());
  RowBlocks blocks(grad.size(0) * grad.size(2), weight.defined() ? head_dim : 0);
  with_kernels(grad.scalar_type(), weight.defined() ? weight.scalar_type() : grad.scalar_type(),
               [&](auto types, const auto& kernels) {
                 using T = typename decltype(types)::T;
                 using W = typename decltype(types)::W;
                 const HeadsBackward<T, W> job{.grad = data<T>(grad),
                                               .x = data<T>(x),
                                               .weight = data<W>(weight),
                                               .cos = data<T>(cos),
                                               .sin = data<T>(sin),
                                               .scale = data<float>(scale),
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
  return {grad_x, weight.defined() ? blocks.total() : at::Tensor()};
}

}  // namespace tessera::kernels::cpu
