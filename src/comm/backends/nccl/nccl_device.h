// The NCCL backend's calls of the CUDA runtime; for everything else it uses c10d and libtorch. The
// tests' stand-in for NCCL replaces them (tests/sim/nccl). Private to the NCCL backend.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tessera::comm {

/// Errors: kUsage where there is no device.
void require_nccl_device();
/// Returns 12030 for CUDA 12.3; 0 where the driver does not tell.
int version_of_driver();
/// A text that no other device of a host has: "0000:41:00.0".
std::string pci_id(c10::Device device);

}  // namespace tessera::comm
