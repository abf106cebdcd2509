// Declares each function of the list (kernels.h) in cpu/ and aten/, and some in fused/.
//
// The types are the list's, so that an implementation with other arguments does not compile and a
// missing one does not link. Only kernels.cpp and tests choose among them.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

/// X(name) for every function that is implemented twice.
#define TESSERA_KERNELS(X)           \
  X(rms_norm)                        \
  X(add_rms_norm)                    \
  X(rms_norm_backward)               \
  X(rope_heads)                      \
  X(rope_heads_backward)             \
  X(swiglu)                          \
  X(swiglu_backward)                 \
  X(swiglu_halves)                   \
  X(swiglu_halves_backward)          \
  X(clamped_swiglu)                  \
  X(clamped_swiglu_backward)         \
  X(causal_attention)                \
  X(causal_attention_forward)        \
  X(causal_attention_backward)       \
  X(part_attention_forward)          \
  X(part_attention_backward)         \
  X(cached_attention)                \
  X(window_softmax)                  \
  X(window_softmax_backward)         \
  X(add_sink_gradients)              \
  X(embedding)                       \
  X(embedding_backward)              \
  X(cross_entropy_sum)               \
  X(cross_entropy_sum_backward)      \
  X(cross_entropy_sum_backward_over) \
  X(sum_in_rank_order)               \
  X(add_into)                        \
  X(divide_into)                     \
  X(add_powers)                      \
  X(join_master)                     \
  X(split_master)                    \
  X(round_half_away)                 \
  X(take_over_changes)               \
  X(adamw)

/// X(name) for those that also use ATen's fused kernels.
#define TESSERA_FUSED_KERNELS(X) \
  X(rms_norm)                    \
  X(add_rms_norm)                \
  X(rms_norm_backward)           \
  X(rope_heads)                  \
  X(rope_heads_backward)         \
  X(causal_attention)            \
  X(causal_attention_forward)    \
  X(causal_attention_backward)   \
  X(part_attention_forward)      \
  X(part_attention_backward)     \
  X(cross_entropy_sum)           \
  X(cross_entropy_sum_backward)  \
  X(cross_entropy_sum_backward_over)

/// X(name) for those that are made of the others, on every device.
#define TESSERA_MADE_KERNELS(X) \
  X(windowed_attention)         \
  X(windowed_attention_backward)

namespace tessera::kernels {

#define TESSERA_IMPLEMENTED(name) \
  namespace cpu {                 \
  decltype(kernels::name) name;   \
  }                               \
  namespace aten {                \
  decltype(kernels::name) name;   \
  }
TESSERA_KERNELS(TESSERA_IMPLEMENTED)
#undef TESSERA_IMPLEMENTED

/// For divide_into: whether ATen's own division of a sum of `dtype` equals that in fp64, rounded
/// once. With more than twice as many digits the quotient of two fp32 numbers rounds as if at once.
inline bool divides_alike(at::ScalarType dtype, double factor) {
  return dtype == at::kDouble || (dtype == at::kFloat && static_cast<float>(factor) == factor);
}

namespace fused {
#define TESSERA_IMPLEMENTED(name) decltype(kernels::name) name;
TESSERA_FUSED_KERNELS(TESSERA_IMPLEMENTED)
#undef TESSERA_IMPLEMENTED

/// Implements p 1 and 2.
at::Tensor sums_of_powers(at::TensorList values, double p);

/// The number of tensors that causal_attention_forward keeps, which differs from aten/'s, and of
/// those of part_attention_forward.
inline constexpr std::size_t kFlashKept = 7, kFlashKeptOfPart = 3;
}  // namespace fused

}  // namespace tessera::kernels
