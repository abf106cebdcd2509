// The only place that picks an implementation.
#include "kernels/kernels.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/test_hooks.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"
#include "kernels/on_cpu.h"
#include "kernels/operations.h"
#include "kernels/seen_blocks.h"

namespace tessera::kernels {

bool on_cpu(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) return false;
  const auto of_devices = test_hooks::kernels_of_devices.get();
  return of_devices == nullptr || !(*of_devices)();
}

namespace {

template <class... Weight>
bool has_kernels(const at::Tensor& activation, const Weight&... weight) {
  return on_cpu(activation) && cpu::has_kernels(activation, weight...);
}

bool same_dtype(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type();
}

at::Tensor or_none(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

/// fused/ has no second derivatives, which need fp64, and not all of its operations have meta
/// implementations.
bool is_fused(const at::Tensor& activation) {
  return !on_cpu(activation) && !activation.is_meta() && activation.scalar_type() != at::kDouble;
}

/// Tables of another dtype change the dtype of the result.
bool is_fused(const at::Tensor& activation, const at::Tensor& table) {
  return is_fused(activation) && same_dtype(activation, table);
}

/// Whether flash attention takes it: 16 bits, heads of at most 256 in steps of 8, any row at all.
/// Heads of values may be shorter than those of keys.
bool are_flash_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     std::int64_t of_values) {
  const std::int64_t head_dim = q.size(4);
  return is_fused(q) && q.element_size() == 2 && same_dtype(q, k) && same_dtype(q, v) &&
         head_dim % 8 == 0 && head_dim <= 256 && of_values % 8 == 0 && of_values <= head_dim &&
         q.numel() > 0;
}

/// Whether queries up to position `end` see all keys up to their own.
bool is_merely_causal(const SeenKeys& seen, std::int64_t end) {
  return !seen.begins && !seen.ends && end <= seen.window;
}

bool is_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const SeenKeys& seen) {
  return is_merely_causal(seen, q.size(2)) && are_flash_heads(q, k, v, v.size(2) / q.size(1));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps, bool rounds_first) {
  TESSERA_WATCHED(rms_norm, x, weight, eps, rounds_first);
  return (has_kernels(x, weight) ? cpu::rms_norm
          : is_fused(x)          ? fused::rms_norm
                                 : aten::rms_norm)(x, weight, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool rounds_first) {
  TESSERA_WATCHED(add_rms_norm, x, residual, weight, eps, rounds_first);
  const bool alike = same_dtype(residual, x);
  return (alike && has_kernels(x, weight) ? cpu::add_rms_norm
          : alike && is_fused(x)          ? fused::add_rms_norm
                                 : aten::add_rms_norm)(x, residual, weight, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale, bool rounds_first,
                                                     bool of_weight) {
  TESSERA_WATCHED(rms_norm_backward, grad, grad_sum, x, weight, scale, rounds_first, of_weight);
  return (has_kernels(x, weight) ? cpu::rms_norm_backward
          : is_fused(x)
              ? fused::rms_norm_backward
              : aten::rms_norm_backward)(grad, grad_sum, x, weight, scale, rounds_first, of_weight);
}

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool rounds_first) {
  TESSERA_WATCHED(rope_heads, x, weight, cos, sin, heads, repeat, eps, rounds_first);
  return (has_kernels(x, or_none(weight)) ? cpu::rope_heads
          : is_fused(x, cos)
              ? fused::rope_heads
              : aten::rope_heads)(x, weight, cos, sin, heads, repeat, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad,
                                                       const std::optional<at::Tensor>& x,
                                                       const std::optional<at::Tensor>& weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& scale,
                                                       bool rounds_first, bool of_weight) {
  TESSERA_WATCHED(rope_heads_backward, grad, x, weight, cos, sin, scale, rounds_first, of_weight);
  return (has_kernels(grad, or_none(weight)) ? cpu::rope_heads_backward
          : is_fused(grad, cos)              ? fused::rope_heads_backward
                                : aten::rope_heads_backward)(grad, x, weight, cos, sin, scale,
                                                             rounds_first, of_weight);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TESSERA_WATCHED(swiglu, gate, up);
  return (has_kernels(gate) && same_dtype(up, gate) ? cpu::swiglu : aten::swiglu)(gate, up);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  TESSERA_WATCHED(swiglu_backward, grad, gate, up);
  return (has_kernels(gate) && same_dtype(up, gate) ? cpu::swiglu_backward : aten::swiglu_backward)(
      grad, gate, up);
}

at::Tensor swiglu_halves(const at::Tensor& both) {
  TESSERA_WATCHED(swiglu_halves, both);
  return (has_kernels(both) ? cpu::swiglu_halves : aten::swiglu_halves)(both);
}

at::Tensor swiglu_halves_backward(const at::Tensor& grad, const at::Tensor& both) {
  TESSERA_WATCHED(swiglu_halves_backward, grad, both);
  return (has_kernels(both) ? cpu::swiglu_halves_backward : aten::swiglu_halves_backward)(grad,
                                                                                          both);
}

at::Tensor clamped_swiglu(const at::Tensor& both, double alpha, double limit) {
  TESSERA_WATCHED(clamped_swiglu, both, alpha, limit);
  return (has_kernels(both) ? cpu::clamped_swiglu : aten::clamped_swiglu)(both, alpha, limit);
}

at::Tensor clamped_swiglu_backward(const at::Tensor& grad, const at::Tensor& both, double alpha,
                                   double limit) {
  TESSERA_WATCHED(clamped_swiglu_backward, grad, both, alpha, limit);
  return (has_kernels(both) ? cpu::clamped_swiglu_backward : aten::clamped_swiglu_backward)(
      grad, both, alpha, limit);
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
  TESSERA_WATCHED(causal_attention, q, k, v, begins, ends, window, scale);
  return (has_kernels(q) ? cpu::causal_attention
          : is_flash(q, k, v, {begins, ends, window})
              ? fused::causal_attention
              : aten::causal_attention)(q, k, v, begins, ends, window, scale);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t window, double scale) {
  TESSERA_WATCHED(causal_attention_forward, q, k, v, begins, ends, window, scale);
  return (has_kernels(q) ? cpu::causal_attention_forward
          : is_flash(q, k, v, {begins, ends, window})
              ? fused::causal_attention_forward
              : aten::causal_attention_forward)(q, k, v, begins, ends, window, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale) {
  TESSERA_WATCHED(causal_attention_backward, grad, kept, begins, ends, window, groups, repeat,
                  scale);
  // The kept tensors begin with q, so the choice is that of forward.
  return (has_kernels(kept[0])               ? cpu::causal_attention_backward
          : kept.size() >= fused::kFlashKept ? fused::causal_attention_backward
                                             : aten::causal_attention_backward)(
      grad, kept, begins, ends, window, groups, repeat, scale);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> part_attention_forward(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale) {
  TESSERA_WATCHED(part_attention_forward, q, keys, values, begins, ends, first, window, scale);
  const bool is_flash = is_merely_causal({begins, ends, window}, first + q.size(2)) &&
                        are_flash_heads(q, keys, values, values.size(3));
  return (has_kernels(q) ? cpu::part_attention_forward
          : is_flash
              ? fused::part_attention_forward
              : aten::part_attention_forward)(q, keys, values, begins, ends, first, window, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> part_attention_backward(
    const at::Tensor& grad, const at::Tensor& result, const at::Tensor& q, const at::Tensor& keys,
    const at::Tensor& values, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t first, std::int64_t window, double scale) {
  TESSERA_WATCHED(part_attention_backward, grad, result, q, keys, values, kept, begins, ends, first,
                  window, scale);
  return (has_kernels(q)                           ? cpu::part_attention_backward
          : kept.size() == fused::kFlashKeptOfPart ? fused::part_attention_backward
                                                   : aten::part_attention_backward)(
      grad, result, q, keys, values, kept, begins, ends, first, window, scale);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  TESSERA_WATCHED(cached_attention, q, keys, values, scale);
  return (has_kernels(q) ? cpu::cached_attention : aten::cached_attention)(q, keys, values, scale);
}

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares,
                    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
                    std::int64_t first, std::int64_t window, std::int64_t groups,
                    std::int64_t repeat, double scale) {
  TESSERA_WATCHED(window_softmax, scores, sinks, shares, begins, ends, first, window, groups,
                  repeat, scale);
  (has_kernels(scores) ? cpu::window_softmax : aten::window_softmax)(
      scores, sinks, shares, begins, ends, first, window, groups, repeat, scale);
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares,
                             const std::optional<at::Tensor>& begins,
                             const std::optional<at::Tensor>& ends, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale) {
  TESSERA_WATCHED(window_softmax_backward, grad, weights, shares, begins, ends, first, window,
                  groups, repeat, scale);
  (has_kernels(grad) ? cpu::window_softmax_backward : aten::window_softmax_backward)(
      grad, weights, shares, begins, ends, first, window, groups, repeat, scale);
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  TESSERA_WATCHED(add_sink_gradients, rows, sum, repeat);
  (on_cpu(rows) ? cpu::add_sink_gradients : aten::add_sink_gradients)(rows, sum, repeat);
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t padding) {
  TESSERA_WATCHED(embedding, ids, weight, padding);
  return (has_kernels(weight) ? cpu::embedding : aten::embedding)(ids, weight, padding);
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& ids, std::int64_t rows,
                              std::int64_t padding) {
  TESSERA_WATCHED(embedding_backward, grad, ids, rows, padding);
  return (has_kernels(grad) ? cpu::embedding_backward : aten::embedding_backward)(grad, ids, rows,
                                                                                  padding);
}

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets) {
  TESSERA_WATCHED(cross_entropy_sum, logits, targets);
  return (has_kernels(logits) ? cpu::cross_entropy_sum
          : is_fused(logits)  ? fused::cross_entropy_sum
                              : aten::cross_entropy_sum)(logits, targets);
}

at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum) {
  TESSERA_WATCHED(cross_entropy_sum_backward, grad, logits, targets, log_sum);
  return (has_kernels(logits) ? cpu::cross_entropy_sum_backward
          : is_fused(logits)  ? fused::cross_entropy_sum_backward
                              : aten::cross_entropy_sum_backward)(grad, logits, targets, log_sum);
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits) {
  TESSERA_WATCHED(cross_entropy_sum_backward_over, grad, targets, log_sum, logits);
  (has_kernels(logits) ? cpu::cross_entropy_sum_backward_over
   : is_fused(logits)  ? fused::cross_entropy_sum_backward_over
                       : aten::cross_entropy_sum_backward_over)(grad, targets, log_sum, logits);
}

std::int64_t rows_of_loss(const at::Tensor& logits) {
  constexpr std::int64_t kOfCache = std::int64_t{1} << 18, kOfDevice = std::int64_t{1} << 26;
  const auto of_test = test_hooks::elements_at_a_time.get();
  const std::int64_t elements = of_test ? (*of_test)() : on_cpu(logits) ? kOfCache : kOfDevice;
  return std::max<std::int64_t>(1, elements / std::max<std::int64_t>(1, logits.size(-1)));
}

void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds) {
  TESSERA_WATCHED(sum_in_rank_order, addends, result, adds);
  (on_cpu(result) ? cpu::sum_in_rank_order : aten::sum_in_rank_order)(addends, result, adds);
}

void add_into(const at::Tensor& result, const at::Tensor& addend) {
  TESSERA_WATCHED(add_into, result, addend);
  (on_cpu(result) ? cpu::add_into : aten::add_into)(result, addend);
}

void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor) {
  TESSERA_WATCHED(divide_into, result, sum, factor);
  (on_cpu(result) ? cpu::divide_into : aten::divide_into)(result, sum, factor);
}

void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum) {
  TESSERA_WATCHED(add_powers, values, p, largest, sum);
  (on_cpu(values) ? cpu::add_powers : aten::add_powers)(values, p, largest, sum);
}

at::Tensor sums_of_powers(at::TensorList values, double p, double largest) {
  if (!on_cpu(values[0]) && (p == 1.0 || p == 2.0)) return fused::sums_of_powers(values, p);
  const at::Tensor sums =
      at::zeros({static_cast<std::int64_t>(values.size())}, values[0].options().dtype(at::kDouble));
  for (std::size_t i = 0; i < values.size(); ++i)
    add_powers(values[i], p, largest, sums[static_cast<std::int64_t>(i)]);
  return sums;
}

void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values) {
  TESSERA_WATCHED(join_master, shard, remainder, values);
  (on_cpu(shard) ? cpu::join_master : aten::join_master)(shard, remainder, values);
}

void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder) {
  TESSERA_WATCHED(split_master, values, shard, remainder);
  (on_cpu(shard) ? cpu::split_master : aten::split_master)(values, shard, remainder);
}

void round_half_away(const at::Tensor& values, const at::Tensor& shard) {
  TESSERA_WATCHED(round_half_away, values, shard);
  (on_cpu(shard) ? cpu::round_half_away : aten::round_half_away)(values, shard);
}

void take_over_changes(const at::Tensor& shard, const at::Tensor& master) {
  TESSERA_WATCHED(take_over_changes, shard, master);
  (on_cpu(shard) ? cpu::take_over_changes : aten::take_over_changes)(shard, master);
}

void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps) {
  TESSERA_WATCHED(adamw, parameters, grads, first, second, steps, lr, beta1, beta2, weight_decay,
                  eps);
  if (parameters.empty()) return;
  // ATen's own kernel, on the device that has both.
  const bool fused = steps[0].device() == parameters[0].device();
  (fused ? cpu::adamw : aten::adamw)(parameters, grads, first, second, steps, lr, beta1, beta2,
                                     weight_decay, eps);
}

}  // namespace tessera::kernels
