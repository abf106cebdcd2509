// Which instruction sets were compiled, and which of them this machine has.
#include "kernels/cpu/tables.h"

namespace tessera::kernels::cpu {

namespace baseline {
const Level& level();
}
#ifdef TESSERA_CPU_X86
namespace avx2 {
const Level& level();
}
namespace avx512 {
const Level& level();
}
#endif

const LevelList& levels() {
#ifdef TESSERA_CPU_X86
  static const LevelList list = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return LevelList{
        {{&avx512::level(), avx512}, {&avx2::level(), avx2}, {&baseline::level(), true}}, 3};
  }();
#else
  static const LevelList list{{{&baseline::level(), true}}, 1};
#endif
  return list;
}

const Level& best_level() {
  static const Level& best = [&]() -> const Level& {
    const LevelList& list = levels();
    int index = 0;
    while (!list.choices[index].supported) ++index;
    return *list.choices[index].level;
  }();
  return best;
}

}  // namespace tessera::kernels::cpu
