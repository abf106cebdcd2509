// The norm and rope, fused.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <cstdint>

#include "base/threads/parallel.h"
#include "base/threads/shapes_only.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"
#include "kernels/results.h"

namespace tessera::kernels::cpu {
namespace {

/// Sums over rows (a norm weight's gradient) in blocks of a fixed number of rows: each has its own
/// fp32 sum and the blocks are added in order, so that the result is the same on any number of
/// threads.
class RowBlocks {
 public:
  /// `elements` is the number of elements of each row for part() to work on; `columns` the number
  /// of sums.
  RowBlocks(std::int64_t rows, std::int64_t elements, std::int64_t columns);

  /// Calls part(begin, end, sums) once a block, on several threads where there are enough elements;
  /// `sums` [columns] begins as zeros.
  void run(c10::function_ref<void(std::int64_t, std::int64_t, float*)> part);

  /// Returns fp32 [columns].
  at::Tensor total() const;

 private:
  std::int64_t rows_, elements_;
  at::Tensor sums_;  ///< [blocks, columns]
};

constexpr std::int64_t kRows = 64;

RowBlocks::RowBlocks(std::int64_t rows, std::int64_t elements, std::int64_t columns)
    : rows_(rows),
      elements_(elements),
      sums_(at::zeros({std::max<std::int64_t>(1, (rows + kRows - 1) / kRows), columns},
                      at::kFloat)) {}

void RowBlocks::run(c10::function_ref<void(std::int64_t, std::int64_t, float*)> part) {
  const std::int64_t columns = sums_.size(1);
  auto* sums = static_cast<float*>(sums_.mutable_data_ptr());
  base::for_ranges(
      rows_, kRows,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; row += kRows) {
          part(row, std::min(end, row + kRows), sums + row / kRows * columns);
        }
      },
      rows_a_thread(elements_));
}

at::Tensor RowBlocks::total() const {
  const std::int64_t blocks = sums_.size(0);
  const std::int64_t columns = sums_.size(1);
  auto* sums = static_cast<float*>(sums_.mutable_data_ptr());
  for (std::int64_t block = 1; block < blocks && !base::shapes_only(); ++block) {
    const float* from = sums + block * columns;
    for (std::int64_t i = 0; i < columns; ++i) sums[i] += from[i];
  }
  // Not a view: a gradient that shares memory with other sums could not be moved by its receiver.
  return blocks == 1 ? sums_.select(0, 0) : sums_.select(0, 0).clone();
}

/// Computes forward into `y`, `sum` (undefined without a residual) and `scale`.
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

/// Returns a new [...] for x [..., K].
at::Tensor empty_scale(const at::Tensor& x) {
  return result(x.sizes().slice(0, static_cast<std::size_t>(x.dim() - 1)),
                x.options().dtype(at::kFloat));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, const at::Tensor& weight,
                                            double eps, bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor y = result_like(x);
  const at::Tensor scale = empty_scale(x);
  run_forward(x, {}, weight.contiguous(), eps, {}, y, scale);
  return {y, scale};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor sum = result_like(x);
  const at::Tensor y = result_like(x);
  const at::Tensor scale = empty_scale(x);
  run_forward(x, residual.contiguous(), weight.contiguous(), eps, sum, y, scale);
  return {sum, y, scale};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad_input,
                                                     const std::optional<at::Tensor>& grad_of_sum,
                                                     const at::Tensor& input,
                                                     const at::Tensor& weight_input,
                                                     const at::Tensor& scale, bool /*rounds_first*/,
                                                     bool of_weight) {
  const at::Tensor grad = grad_input.contiguous();
  const at::Tensor grad_sum = contiguous_or_none(grad_of_sum);
  const at::Tensor x = input.contiguous();
  const at::Tensor weight = weight_input.contiguous();
  const at::Tensor grad_x = result_like(x);
  RowBlocks blocks(scale.numel(), x.size(-1), of_weight ? x.size(-1) : 0);
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
      if (of_weight) part.grad_weight = sums;
      kernels.norm_backward(part, begin, end);
    });
  });
  return {grad_x, of_weight ? blocks.total() : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& input,
                                              const std::optional<at::Tensor>& norm_weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool /*rounds_first*/) {
  const at::Tensor x = input.contiguous();
  const at::Tensor weight = contiguous_or_none(norm_weight);
  const std::int64_t head_dim = x.size(2) / heads;
  const at::Tensor y =
      result({x.size(0), heads / repeat, x.size(1), repeat, head_dim}, x.options());
  const at::Tensor scale =
      weight.defined() ? result({x.size(0) * x.size(1), heads}, x.options().dtype(at::kFloat))
                       : at::Tensor();
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
                                              .table = cos.numel() * 2 / head_dim,
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
                                                       bool /*rounds_first*/, bool of_weight) {
  const at::Tensor grad = grad_input.contiguous();  // [B, G, T, R, D]
  const at::Tensor weight = contiguous_or_none(norm_weight);
  const at::Tensor x = contiguous_or_none(normed);
  const at::Tensor scale = contiguous_or_none(norm_scale);
  const std::int64_t repeat = grad.size(3);
  const std::int64_t heads = grad.size(1) * repeat;
  const std::int64_t head_dim = grad.size(4);
  const at::Tensor grad_x = result({grad.size(0), grad.size(2), heads * head_dim}, grad.options());
  const bool sums_rows = of_weight && weight.defined();
  RowBlocks blocks(grad.size(0) * grad.size(2), heads * head_dim, sums_rows ? head_dim : 0);
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
                                               .table = cos.numel() * 2 / head_dim,
                                               .positions = grad.size(2),
                                               .heads = heads,
                                               .repeat = repeat,
                                               .head_dim = head_dim};
                 blocks.run([&](std::int64_t begin, std::int64_t end, float* sums) {
                   HeadsBackward<T, W> part = job;
                   if (sums_rows) part.grad_weight = sums;
                   kernels.heads_backward(part, begin, end);
                 });
               });
  return {grad_x, sums_rows ? blocks.total() : at::Tensor()};
}

}  // namespace tessera::kernels::cpu
