// One instruction set's table: compiled once for each, with TESSERA_CPU_LEVEL and its flags.
#include "kernels/cpu/level_kernels.h"
#include "kernels/cpu/level_window_kernels.h"

namespace tessera::kernels::cpu::TESSERA_CPU_LEVEL {
namespace {

#define TESSERA_TEXT_OF(word) #word
#define TESSERA_TEXT(word) TESSERA_TEXT_OF(word)

template <class T, class W>
constexpr Kernels<T, W> kernels_of() {
  return {.norm_forward = norm_forward<T, W>,
          .norm_backward = norm_backward<T, W>,
          .heads_forward = heads_forward<T, W>,
          .heads_backward = heads_backward<T, W>,
          .causal_softmax = causal_softmax<T>,
          .causal_softmax_backward = causal_softmax_backward<T>,
          .swiglu_forward = swiglu_forward<T>,
          .swiglu_backward = swiglu_backward<T>,
          .clamped_swiglu_forward = clamped_swiglu_forward<T>,
          .clamped_swiglu_backward = clamped_swiglu_backward<T>,
          .cross_entropy_forward = cross_entropy_forward<T>,
          .cross_entropy_backward = cross_entropy_backward<T>,
          .embedding_backward = embedding_backward<T>};
}

constexpr Level kLevel{.name = TESSERA_TEXT(TESSERA_CPU_LEVEL),
                       .fp32 = kernels_of<float, float>(),
                       .bf16 = kernels_of<BFloat16, BFloat16>(),
                       .bf16_wide_weights = kernels_of<BFloat16, float>(),
                       .window_softmax = window_softmax,
                       .window_softmax_backward = window_softmax_backward};

}  // namespace

const Level& level() { return kLevel; }

}  // namespace tessera::kernels::cpu::TESSERA_CPU_LEVEL
