// Where parameters begin in a bucket's memory (bucket_plan.h).
#pragma once

#include <cstdint>

namespace tessera::layout {

/// What kernels of the CPU load at once, and what CUDA's allocator and copies are aligned to.
inline constexpr std::int64_t kHostAlignment = 64, kDeviceAlignment = 256;

}  // namespace tessera::layout
