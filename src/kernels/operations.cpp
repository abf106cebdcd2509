#include "kernels/operations.h"

#include <torch/library.h>

#include "kernels/kernels.h"

namespace tessera::kernels {
namespace {

#define TESSERA_ATTENDS \
  "(Tensor q, Tensor k, Tensor v, Tensor? begins, Tensor? ends, int window, float scale)"
#define TESSERA_IN_WINDOW                                                                         \
  "Tensor? begins, Tensor? ends, int first, int window, int groups, int repeat, float scale) -> " \
  "()"

/// X(name, arguments and results): tensors that are written are marked, as in libtorch's schemas.
#define TESSERA_OPERATIONS(X)                                                                    \
  X(rms_norm, "(Tensor x, Tensor weight, float eps, bool rounds_first) -> (Tensor, Tensor)")     \
  X(add_rms_norm,                                                                                \
    "(Tensor x, Tensor residual, Tensor weight, float eps, bool rounds_first) -> "               \
    "(Tensor, Tensor, Tensor)")                                                                  \
  X(rms_norm_backward,                                                                           \
    "(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor scale, bool rounds_first, " \
    "bool of_weight) -> (Tensor, Tensor)")                                                       \
  X(rope_heads,                                                                                  \
    "(Tensor x, Tensor? weight, Tensor cos, Tensor sin, int heads, int repeat, float eps, "      \
    "bool rounds_first) "                                                                        \
    "-> (Tensor, Tensor)")                                                                       \
  X(rope_heads_backward,                                                                         \
    "(Tensor grad, Tensor? x, Tensor? weight, Tensor cos, Tensor sin, Tensor? scale, "           \
    "bool rounds_first, bool of_weight) -> (Tensor, Tensor)")                                    \
  X(swiglu, "(Tensor gate, Tensor up) -> Tensor")                                                \
  X(swiglu_backward, "(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")                \
  X(swiglu_halves, "(Tensor both) -> Tensor")                                                    \
  X(swiglu_halves_backward, "(Tensor grad, Tensor both) -> Tensor")                              \
  X(clamped_swiglu, "(Tensor both, float alpha, float limit) -> Tensor")                         \
  X(clamped_swiglu_backward, "(Tensor grad, Tensor both, float alpha, float limit) -> Tensor")   \
  X(causal_attention, TESSERA_ATTENDS " -> Tensor")                                              \
  X(causal_attention_forward, TESSERA_ATTENDS " -> (Tensor, Tensor[])")                          \
  X(causal_attention_backward,                                                                   \
    "(Tensor grad, Tensor[] kept, Tensor? begins, Tensor? ends, int window, int groups, "        \
    "int repeat, float scale) -> (Tensor, Tensor, Tensor)")                                      \
  X(part_attention_forward,                                                                      \
    "(Tensor q, Tensor keys, Tensor values, Tensor? begins, Tensor? ends, int first, "           \
    "int window, float scale) -> (Tensor, Tensor[])")                                            \
  X(part_attention_backward,                                                                     \
    "(Tensor grad, Tensor result, Tensor q, Tensor keys, Tensor values, Tensor[] kept, "         \
    "Tensor? begins, Tensor? ends, int first, int window, float scale) "                         \
    "-> (Tensor, Tensor, Tensor)")                                                               \
  X(cached_attention, "(Tensor q, Tensor keys, Tensor values, float scale) -> Tensor")           \
  X(windowed_attention,                                                                          \
    "(Tensor q, Tensor keys, Tensor values, Tensor? sinks, Tensor? begins, Tensor? ends, "       \
    "int first, int window, float scale) -> Tensor")                                             \
  X(windowed_attention_backward,                                                                 \
    "(Tensor grad, Tensor q, Tensor keys, Tensor values, Tensor? sinks, Tensor? begins, "        \
    "Tensor? ends, int first, int window, float scale, bool of_sinks) "                          \
    "-> (Tensor, Tensor, Tensor, Tensor)")                                                       \
  X(window_softmax, "(Tensor(a!) scores, Tensor? sinks, Tensor(b!)? shares, " TESSERA_IN_WINDOW) \
  X(window_softmax_backward,                                                                     \
    "(Tensor(a!) grad, Tensor weights, Tensor(b!)? shares, " TESSERA_IN_WINDOW)                  \
  X(add_sink_gradients, "(Tensor rows, Tensor(a!) sum, int repeat) -> ()")                       \
  X(embedding, "(Tensor ids, Tensor weight, int padding) -> Tensor")                             \
  X(embedding_backward, "(Tensor grad, Tensor ids, int rows, int padding) -> Tensor")            \
  X(cross_entropy_sum, "(Tensor logits, Tensor targets) -> (Tensor, Tensor)")                    \
  X(cross_entropy_sum_backward,                                                                  \
    "(Tensor grad, Tensor logits, Tensor targets, Tensor log_sum) -> Tensor")                    \
  X(cross_entropy_sum_backward_over,                                                             \
    "(Tensor grad, Tensor targets, Tensor log_sum, Tensor(a!) logits) -> ()")                    \
  X(sum_in_rank_order, "(Tensor[] addends, Tensor(a!) result, bool adds) -> ()")                 \
  X(add_into, "(Tensor(a!) result, Tensor addend) -> ()")                                        \
  X(divide_into, "(Tensor(a!) result, Tensor sum, float factor) -> ()")                          \
  X(add_powers, "(Tensor values, float p, float largest, Tensor(a!) sum) -> ()")                 \
  X(join_master, "(Tensor shard, Tensor remainder, Tensor(a!) values) -> ()")                    \
  X(split_master, "(Tensor values, Tensor(a!) shard, Tensor(b!) remainder) -> ()")               \
  X(round_half_away, "(Tensor values, Tensor(a!) shard) -> ()")                                  \
  X(take_over_changes, "(Tensor shard, Tensor(a!) master) -> ()")                                \
  X(adamw,                                                                                       \
    "(Tensor(a!)[] parameters, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, "        \
    "Tensor[] steps, float lr, float beta1, float beta2, float weight_decay, float eps) -> ()")

torch::Library registered() {
  torch::Library library(torch::Library::DEF, "tessera", std::nullopt, __FILE__, __LINE__);
#define TESSERA_REGISTER(name, schema) \
  library.def(#name schema);           \
  library.impl(#name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(name)));
  TESSERA_OPERATIONS(TESSERA_REGISTER)
#undef TESSERA_REGISTER
  return library;
}

}  // namespace

void register_operations() { static const torch::Library library = registered(); }

}  // namespace tessera::kernels
