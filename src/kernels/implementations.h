// Each function of the list (kernels.h) as cpu/ and as aten/ have it, and some as fused/ has.
//
// The types are the list's own, so that an implementation with other arguments does not compile and
// one that is missing does not link. Here it is kernels.cpp and tests that choose.
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

/// X(name) for those that are made of ATen's fused kernels, too.
#define TESSERA_FUSED_KERNELS(X) \
  X(rms_norm)                    \
  X(add_rms_norm)                \
  X(rms_norm_backward)           \
  X(rope_heads)                  \
  X(rope_heads_backward)         \
  X(causal_attention)            \
  X(causal_attention_forward)    \
  X(causal_attention_backward)   \
  X(cross_entropy_sum)           \
  X(cross_entropy_sum_backward)  \
  X(cross_entropy_sum_backward_over)

/// X(name) for those that are made of the others, whatever the device.
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

/// Of divide_into: whether ATen's own division of a sum of `dtype` is that in fp64, rounded once. With
/// more than twice as many digits the quotient of two numbers of fp32 rounds as if at once.
inline bool divides_alike(at::ScalarType dtype, double factor) {
  return dtype == at::kDouble || (dtype == at::kFloat && static_cast<float>(factor) == factor);
}

namespace fused {
#define TESSERA_IMPLEMENTED(name) decltype(kernels::name) name;
TESSERA_FUSED_KERNELS(TESSERA_IMPLEMENTED)
#undef TESSERA_IMPLEMENTED

/// For p 1 and 2.
at::Tensor sums_of_powers(at::TensorList values, double p);

/// What causal_attention_forward keeps is told from aten/'s by its number.
inline constexpr std::size_t kFlashKept = 7;
}  // namespace fused

}  // namespace tessera::kernels
