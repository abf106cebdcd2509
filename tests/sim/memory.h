// Device memory: one file mapped twice, unreadable at the addresses that tensors hold and readable
// where kernels look. So a host that follows a device's pointer faults, as on a GPU, and says whose
// memory it was.
//
// A block belongs to the stream that was current when it was made, as those of libtorch's caching
// allocators do: freed, it is handed to the next taker on that stream at once, filled with NaN. A
// block that was recorded on other streams (record_stream) waits until the taker's thread has
// waited for these.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace tessera::sim {

/// Before anything else of this file.
void map_memory();

c10::DeviceAllocator& device_memory();

/// The same byte as kernels may use it.
void* for_kernels(const void* pointer);

}  // namespace tessera::sim
