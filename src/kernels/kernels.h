// The list of what is computed on the elements of tensors by functions of this library's own.
//
// Each function has two implementations: `cpu/` is fused, for the dtypes that have kernels there,
// in the widest instruction set of the machine; `aten/` is made of ATen operations, for every other
// device and every other dtype. Norms, rope, causal attention and the loss have a third: `fused/`
// calls the kernels that ATen has for accelerators. kernels.cpp picks by the tensors' device and
// dtype, nothing else does. A function takes tensors and numbers alone and knows no autograd: those
// that have a gradient come in pairs, which the layers join. What a function writes beside its
// results is named by a line "Writes:" and is contiguous; what has no such line reads its arguments
// only. Where a tensor may be missing it is optional. Short symbols: B rows, T positions, G
// key/value heads, R query heads of each, H = G*R, D head_dim, K columns, V vocabulary. Next:
// implementations.h; host_sum.h for memory that is no tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace tessera::kernels {

// Norm and rope.

/// x [..., K], weight [K] -> the norm in x's dtype, and scale [...] = 1 / sqrt(mean of squares +
/// eps) in fp32 (fp64 of fp64). `rounds_first`: aten/ rounds the normed value to x's dtype before
/// the weight multiplies it, as some models do; the others stay in fp32 and round once.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps, bool rounds_first);
/// The same of x + residual in x's dtype -> that sum, its norm, scale.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const at::Tensor& residual,
                                                            const at::Tensor& weight, double eps,
                                                            bool rounds_first);
/// x: what was normed. grad_sum: of add_rms_norm's sum, added. -> gradients of x and of the weight
/// (fp32 in cpu/, however narrow the weight is), the latter undefined and not formed unless
/// `of_weight`.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale, bool rounds_first,
                                                     bool of_weight);

/// x [B, T, H*D], cos and sin [T, D/2], or [B, T, D/2] -> norm of each head where there is a weight [D], then pairs
/// (i, i + D/2) rotated: [B, G, T, R, D], contiguous in cpu/, in fused/ a view of [B, T, H, D]; and
/// the norm's scale [B*T, H], undefined without a weight. x contiguous.
std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool rounds_first);
/// -> gradients of x and of the weight, as rms_norm_backward. x and scale as the weight: without one
/// nobody needs them.
std::tuple<at::Tensor, at::Tensor> rope_heads_backward(const at::Tensor& grad,
                                                       const std::optional<at::Tensor>& x,
                                                       const std::optional<at::Tensor>& weight,
                                                       const at::Tensor& cos, const at::Tensor& sin,
                                                       const std::optional<at::Tensor>& scale,
                                                       bool rounds_first, bool of_weight);

// Gates. Those of one tensor hold both inputs of a gate in its last dim.

/// silu(gate) * up.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up);
/// both [..., 2I], gate then up -> [..., I].
at::Tensor swiglu_halves(const at::Tensor& both);
at::Tensor swiglu_halves_backward(const at::Tensor& grad, const at::Tensor& both);
/// both [..., 2I], gate and up alternate -> (up + 1) * gate * sigmoid(alpha * gate) [..., I], gate
/// at most `limit`, up within +-limit.
at::Tensor clamped_swiglu(const at::Tensor& both, double alpha, double limit);
at::Tensor clamped_swiglu_backward(const at::Tensor& grad, const at::Tensor& both, double alpha,
                                   double limit);

// Attention.

// What a query sees (seen_blocks.h): of the keys up to its own position the last `window`, from
// begins [B, T] i64 on where rows hold several documents, up to ends [B, T] i64 where they say so.
// Every query sees a key. cpu/ never computes what no query of a block sees. Backward forms the
// weights again, a block at a time: nothing of the size of queries times keys is kept.

/// q [B, G, T, R, D], k [B, G, T, 1, D], v [B, T, G*D'] -> [B, T, H*D'].
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale);
/// The same, and what backward reads: the form is the implementation's own.
std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t window, double scale);
/// -> gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale);
/// q [B, G, T, R, D] of the last T of the N positions that keys and values [B, G, N, D] hold ->
/// [B, T, H*D].
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale);

/// Attention whose scores and sums are fp32 (fp64 of fp64), rounded once: q [B, G, T, R, D] of the
/// last T of the N positions that keys and values [B, G, N, D'] hold, sinks [G*R] -> [B, T, H*D'].
/// One implementation for all devices, out of products and window_softmax.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const std::optional<at::Tensor>& sinks,
                              const std::optional<at::Tensor>& begins,
                              const std::optional<at::Tensor>& ends, std::int64_t window,
                              double scale);
/// -> gradients of q, keys, values, and of the sinks as wide as the scores, undefined without them or
/// where they are not wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> windowed_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, double scale, bool of_sinks);

/// Softmax of scale * scores [B*G, Q*R, N] of Q queries, the first at position `first`: each sees
/// the last `window` of the N keys that are not behind it, and what begins and ends [B, Q] leave of
/// them. Sinks [G*R] take part; their shares go to `shares` [B*G, Q*R], if that is there. fp32, or
/// fp64.
/// Writes: scores, shares.
void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares,
                    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
                    std::int64_t first, std::int64_t window, std::int64_t groups,
                    std::int64_t repeat, double scale);
/// From the gradient of the weights to that of the scores, in place; shares become the gradients of
/// the rows' sinks.
/// Writes: grad, shares.
void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares,
                             const std::optional<at::Tensor>& begins,
                             const std::optional<at::Tensor>& ends, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale);
/// Adds rows [B*G, Q*R] to sum [G*R] fp64: terms that nearly cancel; in cpu/ in one order.
/// Writes: sum.
void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat);

// Tokens and loss.

/// ids [...] i64, weight [V, K] -> [..., K].
at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight, std::int64_t padding);
/// -> [rows, K]. The row `padding` gets nothing (-1: every row gets its own).
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& ids, std::int64_t rows,
                              std::int64_t padding);

/// How many rows of logits [..., V] a loss takes at a time, as fp32: on the CPU what stays in the
/// cache, on a device 256 MiB.
std::int64_t rows_of_loss(const at::Tensor& logits);
/// logits [B, T, V], targets [B, T] i64, -100 = ignored -> the sum [] in fp32 (fp64 of fp64), and
/// what backward reads beside the logits: the rows' log of the sum of exponentials [B, T] in cpu/
/// and fused/, an empty tensor in aten/, where it is formed again.
std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets);
at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum);
/// The same over the logits.
/// Writes: logits.
void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits);

// Sums over ranks, gradients, optimizers. Bits are those of cpu/ in aten/ too, but for add_powers
// and adamw.

/// Whether values of `from` can be added in `to`: the same dtype (bool excepted), or a wider one of
/// its kind.
bool can_sum(at::ScalarType from, at::ScalarType to);
/// result = a0 + a1 + ..., or result + (a0 + a1 + ...) where it `adds`: left to right, each addend
/// widened to the result's dtype first. An addend may be the result itself where it does not add.
/// Writes: result.
void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds);
/// result += addend, of one shape, each value widened to the result's dtype first; of a wider
/// addend the sum is rounded. In cpu/ a contiguous addend that is narrower takes one pass, where
/// ATen makes a copy of it in the result's dtype.
/// Writes: result.
void add_into(const at::Tensor& result, const at::Tensor& addend);

/// result = sum / factor, formed in fp64 and rounded once, to result's dtype (fp64 sums: the
/// quotient is one of fp64 first); `result` may be `sum` itself. Both contiguous, of the same size,
/// floating.
/// Writes: result.
void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor);

/// Adds the sum of |value|^p to `sum` [1] fp64; p other than 1 and 2: of |value| / largest, so that
/// no power overflows. Products and sums are fp64. Writes: sum.
void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum);

/// The same of each tensor alone, [values] fp64; none of them is empty. On a device one kernel forms
/// all of p 1 and 2, by way of norms: the last bits are its own.
at::Tensor sums_of_powers(at::TensorList values, double p, double largest);

/// The float32 values of a bfloat16 shard, its own bits and sixteen more beside it
/// (base/split_float.h): four bytes an element in all, and the shard is gathered as it is.
/// values [n] float32 = shard [n] bfloat16 with remainder [n] int16.
/// Writes: values.
void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values);
/// The inverse: rounds values into the shard, halves away from zero, and keeps the rest.
/// Writes: shard, remainder.
void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder);
/// shard [n] bfloat16 = values [n] float32, rounded as split_master does.
/// Writes: shard.
void round_half_away(const at::Tensor& values, const at::Tensor& shard);
/// Elements of master [n] float32 that no longer round to those of shard [n] float16 become these.
/// Writes: master.
void take_over_changes(const at::Tensor& shard, const at::Tensor& master);

/// One step of AdamW as PyTorch's; all lists of one length, `steps` [] fp32 where the parameters
/// are, or on the host.
/// Writes: parameters, first, second.
void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps);

}  // namespace tessera::kernels
