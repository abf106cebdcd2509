// A device that does not exist, for dry runs of the work of a GPU.
//
// libtorch has names for kinds of devices whose kernels it does not contain. One of them stands for
// a GPU here: tensors, autograd and streams know it, no kernel can be launched on it by mistake,
// and CUDA in the same process is not affected. Its streams and events do nothing, since a dry run
// follows the host's order. Its tensors have addresses (allocator.h), and fake_operations.h runs
// its operations. Next: device_tensors.h.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace tessera::dry {

inline constexpr auto kFakeDevice = c10::DeviceType::MAIA;
inline constexpr auto kFakeDeviceKey = c10::DispatchKey::MAIA;

/// Returns device 0 of that kind. The first call registers it with libtorch. Threads: any.
c10::Device fake_device();

}  // namespace tessera::dry
