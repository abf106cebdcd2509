// The instruction sets that were compiled, and the choice among those that this machine has.
#include "kernels/cpu/tables.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace tessera::kernels::cpu {

namespace baseline {
const Isa& isa();
}
#ifdef TESSERA_CPU_X86
namespace avx2 {
const Isa& isa();
}
namespace avx512 {
const Isa& isa();
}
#endif

const IsaList& isas() {
#ifdef TESSERA_CPU_X86
  static const IsaList list = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return IsaList{{{&avx512::isa(), avx512}, {&avx2::isa(), avx2}, {&baseline::isa(), true}}, 3};
  }();
#else
  static const IsaList list{{{&baseline::isa(), true}}, 1};
#endif
  return list;
}

const Isa& best_isa() {
  static const Isa& best = [&]() -> const Isa& {
    const IsaList& list = isas();
    int index = 0;
    while (!list.choices[index].supported) ++index;
    return *list.choices[index].isa;
  }();
  return best;
}

bool has_bf16_products() {
#if defined(TESSERA_CPU_X86)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(HWCAP2_BF16)
  return (::getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#else
  return false;
#endif
}

}  // namespace tessera::kernels::cpu
