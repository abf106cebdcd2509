// Where the ranks of a test compute: on the CPU, or on devices of the simulator, if the program
// links it (drawn_place.h). A test says here(tensor) of what it makes itself, and is then one of
// any place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <string>
#include <utility>

namespace tessera::test {

struct Place {
  std::string device = "cpu";  ///< WorldOptions::device
  bool side = false;           ///< not on the device's default stream
};

/// Of the tests that begin from now on. Threads: the program's own.
inline Place& place() {
  static Place of_process;
  return of_process;
}

/// The device of the rank whose thread this is; elsewhere the CPU.
inline c10::Device& device_here() {
  thread_local c10::Device device = c10::kCPU;
  return device;
}

/// The tensor where this rank computes; on the CPU itself.
inline at::Tensor here(at::Tensor tensor) {
  if (!tensor.is_cpu() || device_here().is_cpu()) return tensor;
  return tensor.detach().to(device_here()).requires_grad_(tensor.requires_grad());
}

}  // namespace tessera::test
