// KernelsOf: the kind of device whose kernels a dry run or a plan assumes. Next: dry_run.h.
#pragma once

#include <cstdint>

namespace tessera {

/// The kind of device. The kernels of the two keep different tensors for their backwards, and only
/// a GPU has memory apart from its host's.
enum class KernelsOf : std::uint8_t {
  kCpu,  ///< kernels of the CPU
  kGpu,  ///< kernels of a CUDA device
};

}  // namespace tessera
