// Each function of the list (kernels.h) as cpu/ and as aten/ have it.
//
// The types are the list's own, so that an implementation with other arguments does not compile and
// one that is missing does not link. Here it is kernels.cpp and tests that choose.
#pragma once

#include "kernels/kernels.h"

#define TESSERA_IMPLEMENTED(name) \
  namespace cpu {                 \
  decltype(kernels::name) name;   \
  }                               \
  namespace aten {                \
  decltype(kernels::name) name;   \
  }

namespace tessera::kernels {

TESSERA_IMPLEMENTED(rms_norm)
TESSERA_IMPLEMENTED(add_rms_norm)
TESSERA_IMPLEMENTED(rms_norm_backward)
TESSERA_IMPLEMENTED(rope_heads)
TESSERA_IMPLEMENTED(rope_heads_backward)
TESSERA_IMPLEMENTED(swiglu)
TESSERA_IMPLEMENTED(swiglu_backward)
TESSERA_IMPLEMENTED(swiglu_halves)
TESSERA_IMPLEMENTED(swiglu_halves_backward)
TESSERA_IMPLEMENTED(clamped_swiglu)
TESSERA_IMPLEMENTED(clamped_swiglu_backward)
TESSERA_IMPLEMENTED(causal_attention)
TESSERA_IMPLEMENTED(causal_attention_forward)
TESSERA_IMPLEMENTED(causal_attention_backward)
TESSERA_IMPLEMENTED(cached_attention)
TESSERA_IMPLEMENTED(window_softmax)
TESSERA_IMPLEMENTED(window_softmax_backward)
TESSERA_IMPLEMENTED(add_sink_gradients)
TESSERA_IMPLEMENTED(embedding)
TESSERA_IMPLEMENTED(embedding_backward)
TESSERA_IMPLEMENTED(cross_entropy_sum)
TESSERA_IMPLEMENTED(cross_entropy_sum_backward)
TESSERA_IMPLEMENTED(cross_entropy_sum_backward_over)
TESSERA_IMPLEMENTED(sum_in_rank_order)
TESSERA_IMPLEMENTED(divide_into)
TESSERA_IMPLEMENTED(add_powers)
TESSERA_IMPLEMENTED(join_master)
TESSERA_IMPLEMENTED(split_master)
TESSERA_IMPLEMENTED(round_half_away)
TESSERA_IMPLEMENTED(take_over_changes)
TESSERA_IMPLEMENTED(adamw)

}  // namespace tessera::kernels

#undef TESSERA_IMPLEMENTED
