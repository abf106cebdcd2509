// The list of the library's own functions on the elements of tensors.
//
// Each function has two implementations: `cpu/` is fused, for the dtypes that have kernels there,
// in the widest instruction set of the machine; `aten/` is made of ATen operations, for every other
// device and every other dtype. Norms, rope, causal attention and the loss have a third: `fused/`
// calls the kernels that ATen has for accelerators. Only kernels.cpp picks one, by the tensors'
// device and dtype. A function takes only tensors and numbers and knows no autograd: functions with
// a gradient come in pairs, which the layers join. A line "Writes:" names what a function writes in
// addition to its results; that is contiguous. A function without such a line only reads its
// arguments. A tensor that may be missing is optional. Short symbols: B rows, T positions, G
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
/// x: what was normed. grad_sum: the gradient of add_rms_norm's sum, which is added. -> gradients
/// of x and of the weight (fp32 in cpu/, even if the weight is narrower); the latter is undefined
/// and not computed unless `of_weight`.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad,
                                                     const std::optional<at::Tensor>& grad_sum,
                                                     const at::Tensor& x, const at::Tensor& weight,
                                                     const at::Tensor& scale, bool rounds_first,
                                                     bool of_weight);

/// x [B, T, H*D], cos and sin [T, D/2] or [B, T, D/2] -> the norm of each head where there is a
/// weight [D], then pairs (i, i + D/2) rotated: [B, G, T, R, D], contiguous in cpu/, in fused/ a
/// view of [B, T, H, D]; and the norm's scale [B*T, H], undefined without a weight. x contiguous.
std::tuple<at::Tensor, at::Tensor> rope_heads(const at::Tensor& x,
                                              const std::optional<at::Tensor>& weight,
                                              const at::Tensor& cos, const at::Tensor& sin,
                                              std::int64_t heads, std::int64_t repeat, double eps,
                                              bool rounds_first);
/// -> gradients of x and of the weight, as rms_norm_backward. x and scale are optional like the
/// weight: without one they are not needed.
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

// A query sees (seen_blocks.h) the last `window` keys up to its own position; from position begins
// [B, T] i64 on where rows hold several documents, and up to ends [B, T] i64 where that is given.
// Every query sees a key. cpu/ never computes what no query of a block sees. Backward computes the
// weights again, a block at a time: nothing of the size of queries times keys is kept.

/// q [B, G, T, R, D], k [B, G, T, 1, D], v [B, T, G*D'] -> [B, T, H*D'].
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale);
/// The same, and the tensors that backward reads, in a form of the implementation.
std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t window, double scale);
/// -> gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale);

/// Attention of a part of a row's queries: q [B, G, T, R, D] at positions first .. first + T - 1
/// among the N of keys and values [B, G, N, D], [B, G, N, D']; begins and ends [B, T] count these
/// keys. Views of longer tensors are not copied. -> [B, T, H*D'], and the tensors that backward
/// reads in addition to q, keys, values and the result. In cpu/ parts that begin and end at
/// multiples of 256 have the bits of one call for the whole row where R is a power of two; the
/// gradients of keys and values have the same terms, added in another order.
std::tuple<at::Tensor, std::vector<at::Tensor>> part_attention_forward(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale);
/// -> the gradient of q, and what the part adds to those of keys and values: [B, G, N, .] in fp32
/// (fp64 for fp64), zero where no query of the part sees; fused/ rounds it to the keys' dtype.
std::tuple<at::Tensor, at::Tensor, at::Tensor> part_attention_backward(
    const at::Tensor& grad, const at::Tensor& result, const at::Tensor& q, const at::Tensor& keys,
    const at::Tensor& values, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t first, std::int64_t window, double scale);

/// q [B, G, T, R, D] of the last T of the N positions that keys and values [B, G, N, D] hold ->
/// [B, T, H*D].
at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale);

/// Attention whose scores and sums are fp32 (fp64 for fp64), rounded once: q [B, G, T, R, D] at
/// positions first .. first + T - 1 among the N of keys and values [B, G, N, D'], sinks [G*R] ->
/// [B, T, H*D']. One implementation for all devices, made of products and window_softmax.
at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const std::optional<at::Tensor>& sinks,
                              const std::optional<at::Tensor>& begins,
                              const std::optional<at::Tensor>& ends, std::int64_t first,
                              std::int64_t window, double scale);
/// -> gradients of q, and as wide as the scores those of keys, values and sinks; the last is
/// undefined without sinks or where it is not requested.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> windowed_attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t first, std::int64_t window, double scale,
    bool of_sinks);

/// Softmax of scale * scores [B*G, Q*R, N] of Q queries, the first at position `first`. Each sees,
/// among the N keys, the last `window` up to its own position, limited by begins and ends [B, Q].
/// Sinks [G*R] take part; their shares go to `shares` [B*G, Q*R], if that is given. fp32, or fp64.
/// Writes: scores, shares.
void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares,
                    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
                    std::int64_t first, std::int64_t window, std::int64_t groups,
                    std::int64_t repeat, double scale);
/// Turns the gradient of the weights into that of the scores, in place; shares become the gradients
/// of the rows' sinks.
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
/// -> [rows, K]. The row `padding` gets no gradient (-1: every row gets its own).
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& ids, std::int64_t rows,
                              std::int64_t padding);

/// Returns how many rows of logits [..., V] a loss takes at a time, in fp32: on the CPU those that
/// stay in the cache, on a device 256 MiB.
std::int64_t rows_of_loss(const at::Tensor& logits);
/// logits [B, T, V], targets [B, T] i64, -100 = ignored -> the sum [] in fp32 (fp64 for fp64), and
/// what backward reads in addition to the logits: the rows' log of the sum of exponentials [B, T]
/// in cpu/ and fused/, an empty tensor in aten/, which computes it again.
std::tuple<at::Tensor, at::Tensor> cross_entropy_sum(const at::Tensor& logits,
                                                     const at::Tensor& targets);
at::Tensor cross_entropy_sum_backward(const at::Tensor& grad, const at::Tensor& logits,
                                      const at::Tensor& targets, const at::Tensor& log_sum);
/// The same, written over the logits.
/// Writes: logits.
void cross_entropy_sum_backward_over(const at::Tensor& grad, const at::Tensor& targets,
                                     const at::Tensor& log_sum, const at::Tensor& logits);

// Sums over ranks, gradients, optimizers. aten/ has the bits of cpu/, except for add_powers and
// adamw.

/// Whether values of `from` can be added in `to`: the same dtype (bool excepted), or a wider one of
/// its kind.
bool can_sum(at::ScalarType from, at::ScalarType to);
/// result = a0 + a1 + ..., or result + (a0 + a1 + ...) where it `adds`: left to right, each addend
/// widened to the result's dtype first. An addend may be the result itself where it does not add.
/// Writes: result.
void sum_in_rank_order(at::TensorList addends, const at::Tensor& result, bool adds);
/// result += addend, of one shape, each value widened to the result's dtype first; where the addend
/// is wider the sum is rounded. In cpu/ a contiguous addend that is narrower takes one pass, where
/// ATen makes a copy of it in the result's dtype.
/// Writes: result.
void add_into(const at::Tensor& result, const at::Tensor& addend);

/// result = sum / factor, computed in fp64 and rounded once to result's dtype (fp64 sums: the
/// quotient is one of fp64 first); `result` may be `sum` itself. Both contiguous, of the same size,
/// floating.
/// Writes: result.
void divide_into(const at::Tensor& result, const at::Tensor& sum, double factor);

/// Adds the sum of |value|^p to `sum` [1] fp64; for p other than 1 and 2 that of |value| / largest,
/// so that no power overflows. Products and sums are fp64. Writes: sum.
void add_powers(const at::Tensor& values, double p, double largest, const at::Tensor& sum);

/// The same for each tensor separately, [values] fp64; no tensor is empty. On a device one kernel
/// computes all for p 1 and 2, from norms: the last bits may differ.
at::Tensor sums_of_powers(at::TensorList values, double p, double largest);

/// The float32 values of a bfloat16 shard: its own bits and sixteen more in `remainder`
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
/// Replaces elements of master [n] float32 that no longer round to those of shard [n] float16 by
/// these.
/// Writes: master.
void take_over_changes(const at::Tensor& shard, const at::Tensor& master);

/// One step of AdamW as PyTorch's. All lists have one length; `steps` [] fp32 are on the
/// parameters' device, or on the host.
/// Writes: parameters, first, second.
void adamw(at::TensorList parameters, at::TensorList grads, at::TensorList first,
           at::TensorList second, at::TensorList steps, double lr, double beta1, double beta2,
           double weight_decay, double eps);

}  // namespace tessera::kernels
