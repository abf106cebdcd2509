// bf16 as the CPU kernels see it: two bytes and no operations.
#pragma once

namespace tessera::kernels::cpu {

struct BFloat16 {
  unsigned short bits;
};

}  // namespace tessera::kernels::cpu
