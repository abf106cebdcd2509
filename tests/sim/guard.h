// Devices and streams as a thread has them current.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace tessera::sim {

inline constexpr int kMostDevices = 16;

/// Streams and events to libtorch (c10's guard of the device).
void register_guard(int devices);

int device_count();
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
/// Returns this thread's current stream of that device.
c10::Stream current_stream(c10::DeviceIndex index);

}  // namespace tessera::sim
