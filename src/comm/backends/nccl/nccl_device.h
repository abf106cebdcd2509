// What the NCCL backend asks the CUDA runtime itself: all else goes by c10d and libtorch. A test's
// stand-in for NCCL brings its own (tests/sim/nccl). Private to the NCCL backend.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tessera::comm {

/// Errors: kUsage where there is no device.
void require_nccl_device();
/// 12030 for CUDA 12.3; 0 where the driver does not say.
int version_of_driver();
/// What no other device of a host has: "0000:41:00.0".
std::string pci_id(c10::Device device);

}  // namespace tessera::comm
