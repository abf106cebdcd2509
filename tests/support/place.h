// Says where the ranks of a test compute: on the CPU, or on devices of the simulator, if the
// program links it (drawn_place.h), there also over the stand-in for NCCL. A test calls
// here(tensor) for the tensors that it makes, and can then run in any place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::test {

struct Place {
  std::string device = "cpu";  ///< WorldOptions::device
  bool side = false;           ///< not on the device's default stream
  bool nccl = false;           ///< over NCCL, for every backend that a test names
};

/// Returns the place of the tests that begin from now on. Threads: the program's own.
inline Place& place() {
  static Place of_process;
  return of_process;
}

/// Asks devices what they have found since the last time, races that somebody swallowed included,
/// where they find any (tests/sim). Threads: the program's own, between two cases.
inline std::function<std::vector<std::string>()>& found_by_devices() {
  static std::function<std::vector<std::string>()> of_process = [] {
    return std::vector<std::string>();
  };
  return of_process;
}

/// Releases devices that stand still behind what a failed rank will not launch: its thread calls
/// `one`; `over` follows once all threads have ended, when nothing stands still any longer.
struct FailedRanks {
  std::function<void()> one = [] {};
  std::function<void()> over = [] {};
};
inline FailedRanks& failed_ranks() {
  static FailedRanks of_process;
  return of_process;
}

/// The device of the rank whose thread this is; elsewhere the CPU.
inline c10::Device& device_here() {
  thread_local c10::Device device = c10::kCPU;
  return device;
}

/// While it lives, here() is the CPU: what results are compared with is formed there.
class OnTheHost {
 public:
  OnTheHost() : before_(std::exchange(device_here(), c10::kCPU)) {}
  ~OnTheHost() { device_here() = before_; }
  OnTheHost(const OnTheHost&) = delete;
  OnTheHost& operator=(const OnTheHost&) = delete;

 private:
  const c10::Device before_;
};

/// The tensor where this rank computes; on the CPU itself.
inline at::Tensor here(at::Tensor tensor) {
  if (!tensor.is_cpu() || device_here().is_cpu()) return tensor;
  return tensor.detach().to(device_here()).requires_grad_(tensor.requires_grad());
}

}  // namespace tessera::test
