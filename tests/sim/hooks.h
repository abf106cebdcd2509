// The rest of the device for libtorch, besides streams and memory, and the device's random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <optional>

namespace tessera::sim {

void register_hooks();

/// A generator of the CPU whose numbers follow from the device's state, which moves on; none where
/// drawing is refused (AllowDraws).
std::optional<at::Generator> draw_from(c10::DeviceIndex device);

}  // namespace tessera::sim
