// The one place that picks an implementation.
#include "kernels/kernels.h"

#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"

namespace tessera::kernels {
namespace {

using cpu::has_kernels;

bool on_cpu(const at::Tensor& tensor) { return tensor.device().is_cpu(); }

bool same_dtype(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type();
}

at::Tensor or_none(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps, bool rounds_first) {
  return (has_kernels(x, weight) ? cpu::rms_norm : aten::rms_norm)(x, weight, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool rounds_first) {
  const bool fused = has_kernels(x, weight) && same_dtype(residual, x);
  return (fused ? cpu::add_rms_norm : aten::add_rms_norm)(x, residual, weight, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale, bool rounds_first) {
  return (has_kernels(x, weight) ? cpu::rms_norm_backward : aten::rms_norm_backward)(
      grad, grad_sum, x, weight, scale, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool rounds_first) {
  return (has_kernels(x, or_none(weight)) ? cpu::rope_heads : aten::rope_heads)(
      x, weight, cos, sin, heads, repeat, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad,
                                                       const std::optional<at::Tensor>& x,
                                                       const std::optional<at::Tensor>& weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& scale,
                                                       bool rounds_first) {
  return (has_kernels(grad, or_none(weight))
              ? cpu::rope_heads_backward
              : aten::rope_heads_backward)(grad, x, weight, cos, sin, scale, rounds_first);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return (has_kernels(gate) && same_dtype(up, gate) ? cpu::swiglu : aten::swiglu)(gate, up);
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  return (has_kernels(gate) && same_dtype(up, gate) ? cpu::swiglu_backward : aten::swiglu_backward)(
      grad, gate, up);
}

at::Tensor swiglu_halves(const at::Tensor& both) {
  return (has_kernels(both) ? cpu::swiglu_halves : aten::swiglu_halves)(both);
}

at::Tensor swiglu_halves_backward(const at::Tensor& grad, const at::Tensor& both) {
  return (has_kernels(both) ? cpu::swiglu_halves_backward : aten::swiglu_halves_backward)(grad,
                                                                                          both);
}

at::Tensor clamped_swiglu(const at::Tensor& both, double alpha, double limit) {
  return (has_kernels(both) ? cpu::clamped_swiglu : aten::clamped_swiglu)(both, alpha, limit);
}

at::Tensor clamped_swiglu_backward(const at::Tensor& grad, const at::Tensor& both, double alpha,
                                   double limit) {
  return (has_kernels(both) ? cpu::clamped_swiglu_backward : aten::clamped_swiglu_backward)(
      grad, both, alpha, limit);
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return (has_kernels(q) ? cpu::causal_attention : aten::causal_attention)(q, k, v, scale);
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(const at::Tensor& q,
                                                                         const at::Tensor& k,
                                                                         const at::Tensor& v,
                                                                         double scale) {
  return (has_kernels(q) ? cpu::causal_attention_forward : aten::causal_attention_forward)(q, k, v,
                                                                                           scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(const at::Tensor& grad,
                                                                         at::TensorList kept,
                                                                         std::int64_t groups,
                                                                         std::int64_t repeat,
                                                                         double scale) {
  // What is kept has q first: the same choice as forward's.
  return (has_kernels(kept[0]) ? cpu::causal_attention_backward : aten::causal_attention_backward)(
      grad, kept, groups, repeat, scale);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  return (has_kernels(q) ? cpu::cached_attention : aten::cached_attention)(q, keys, values, scale);
}

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares, std::int64_t first,
                    std::int64_t window, std::int64_t groups, std::int64_t repeat, double scale) {
  (has_kernels(scores) ? cpu::window_softmax : aten::window_softmax)(scores, sinks, shares, first,
                                                                     window, groups, repeat, scale);
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale) {
  (has_kernels(grad) ? cpu::window_softmax_backward : aten::window_softmax_backward)(
      grad, weights, shares, first, window, groups, repeat, scale);
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  (on_cpu(rows) ? cpu::add_sink_gradients : aten::add_sink_gradients)(rows, sum, repeat);
}

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t padding) {
  return (has_kernels(weight) ? cpu::embedding : aten::embedding)(ids, weight, padding);
}

at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& ids, std::int64_t rows,
                              std::int64_t padding) {
  return (has_kernels(grad) ? cpu::embedding_backward : aten::embedding_backward)(grad, ids, rows,
                                                                                  padding);
}

std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets) {
  return (has_kernels(logits) ? cpu::cross_entropy_sum : aten::cross_entropy_sum)(logits, targets);
}

at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum) {
  return (has_kernels(logits) ? cpu::cross_entropy_sum_backward : aten::cross_entropy_sum_backward)(
      grad, logits, targets, log_sum);
}

void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits) {
  (has_kernels(logits) ? cpu::cross_entropy_sum_backward_over
                       : aten::cross_entropy_sum_backward_over)(grad, targets, log_sum, logits);
}

void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds) {
  (on_cpu(result) ? cpu::sum_in_rank_order : aten::sum_in_rank_order)(addends, result, adds);
}

void add_into(const at::Tensor& result, const at::Tensor& addend) {
  (on_cpu(result) ? cpu::add_into : aten::add_into)(result, addend);
}

void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor) {
  (on_cpu(result) ? cpu::divide_into : aten::divide_into)(result, sum, factor);
}

void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum) {
  (on_cpu(values) ? cpu::add_powers : aten::add_powers)(values, p, largest, sum);
}

void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values) {
  (on_cpu(shard) ? cpu::join_master : aten::join_master)(shard, remainder, values);
}

void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder) {
  (on_cpu(shard) ? cpu::split_master : aten::split_master)(values, shard, remainder);
}

void round_half_away(const at::Tensor& values, const at::Tensor& shard) {
  (on_cpu(shard) ? cpu::round_half_away : aten::round_half_away)(values, shard);
}

void take_over_changes(const at::Tensor& shard, const at::Tensor& master) {
  (on_cpu(shard) ? cpu::take_over_changes : aten::take_over_changes)(shard, master);
}

void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps) {
  if (parameters.empty()) return;
  // ATen's own kernel, of whatever device both are on.
  const bool fused = steps[0].device() == parameters[0].device();
  (fused ? cpu::adamw : aten::adamw)(parameters, grads, first, second, steps, lr, beta1, beta2,
                                     weight_decay, eps);
}

}  // namespace tessera::kernels
