// KernelsOf: for whose kernels something is counted or planned where nothing is computed.
#pragma once

#include <cstdint>

namespace tessera {

/// They keep different tensors for their backwards, and only a GPU's memory is apart from its host's.
enum class KernelsOf : std::uint8_t { kCpu, kGpu };

}  // namespace tessera
