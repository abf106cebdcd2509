// The alignment of parameters in a bucket's memory (bucket_plan.h).
#pragma once

#include <cstdint>

namespace tessera::layout {

/// The bytes that CPU kernels load at once, and the alignment of CUDA's allocator and copies.
inline constexpr std::int64_t kHostAlignment = 64, kDeviceAlignment = 256;

}  // namespace tessera::layout
