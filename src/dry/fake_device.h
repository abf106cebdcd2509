// A device that is not there, for dry runs of what a GPU would compute.
//
// libtorch has names for kinds of devices whose kernels it does not bring. One of them stands for a GPU
// here: tensors, autograd and streams know it, no kernel can be launched on it by mistake, and CUDA in
// the same process does not notice. Its streams and events do nothing, as a dry run is in the host's
// order; its tensors have addresses (allocator.h), and its operations are run by fake_operations.h.
// Next: device_tensors.h.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace tessera::dry {

inline constexpr auto kFakeDevice = c10::DeviceType::MAIA;
inline constexpr auto kFakeDeviceKey = c10::DispatchKey::MAIA;

/// Number 0 of that kind. The first call tells libtorch of it. Threads: any.
c10::Device fake_device();

}  // namespace tessera::dry
