// The device of a rank: its choice, and what the rank's thread has to know of it.
//
// Ranks of a host take one device each, by their number on the host; where only one is visible
// (Slurm and containers show each rank its own) they take that. Uses c10's generic guards and no
// CUDA header. Next: stream.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

class Store;

/// The index among the visible devices that a local rank takes; none where there are too few.
std::optional<int> device_number(int local_rank, int visible);
/// The number of CUDA devices that this process sees; 0 without a driver, or in a libtorch without
/// CUDA.
int cuda_devices();
/// WorldOptions::device for the `ranks` that own spawn is to start on a host that shows its CUDA
/// devices to all of them: "cpu" where "auto" was requested and there are too few, else `name`.
/// Ranks share the device that `name` numbers ("cuda:0"), and the only device if `backend` is gloo.
/// Errors: kUsage where "cuda" finds too few.
std::string device_of_spawned(const std::string& name, const std::string& backend, int ranks,
                              int devices);
/// Returns WorldOptions::device of a local rank. On the CPU there is no index, else it is always
/// set. Errors: kUsage where libtorch knows no such device, sees none, or has too few for the rank.
c10::Device device_of_rank(const std::string& name, int local_rank);

/// The properties of a device in addition to its number; "" and 0 where unknown.
struct DeviceFacts {
  std::string name;    ///< "NVIDIA H100 80GB HBM3"
  int capability = 0;  ///< CUDA's: 90 for 9.0
};
DeviceFacts facts_of(c10::Device device);

/// Bytes of a device's memory that this process has taken. Not for the CPU.
struct DeviceMemory {
  std::int64_t held = 0;      ///< by tensors that live
  std::int64_t peak = 0;      ///< the most that tensors held at once
  std::int64_t reserved = 0;  ///< the most that the allocator took, its free blocks included
};
DeviceMemory memory_of(c10::Device device);
/// Resets the two peaks: from here on they count what follows.
void begin_memory_peaks(c10::Device device);
/// Bytes of the whole device, used by any process; none where libtorch does not tell.
std::optional<std::int64_t> memory_size(c10::Device device);
/// Lets libtorch's allocator grow its segments. Otherwise it allocates one more segment, and a
/// tensor of another size cannot use the free rest of the first. Sets PYTORCH_CUDA_ALLOC_CONF where
/// no variable configures the allocator. Call it before CUDA is used, as the program starts.
void prepare_growing_segments();

/// Writes into the store of a World that this rank computes on a device of a host, for backends
/// that need one device for each rank. Where `host` is "" it is unknown, and nothing is compared.
/// Errors: kUsage where another rank computes on the same device, naming both.
void claim_device(Store& store, const std::string& host, const std::string& device, int rank);

/// Writes into the store of a World on what kind of device this rank computes, and by which
/// backend. Call it before the ranks meet. `kind`: "cuda by nccl".
void tell_device_kind(Store& store, const std::string& kind, int rank);
/// Returns "" where all ranks have written the same kind, else the refusal, which names two of them
/// and is the same on every rank. Call it after the ranks have met. "auto" depends on the host, and
/// ranks of two kinds would wait for each other until the timeout.
std::string differing_device_kinds(Store& store);

/// Makes the calling thread compute on the device: it is the thread's current device, and a
/// backward that the thread begins stays on the thread. Autograd has one thread a device: ranks
/// that share a device would wait for each other there for ever, and hooks and markers would have
/// other streams and other thread-locals. Not for the CPU, whose backward stays on its thread
/// anyway.
void use_device(c10::Device device);
/// Makes sums on the device deterministic, for the whole process. Operations whose kernels are not
/// deterministic throw from now on; kernels that could be (flash attention's backward) are not
/// where libtorch only warns. Not for the CPU, whose kernels are deterministic. Errors: kUsage on
/// CUDA where CUBLAS_WORKSPACE_CONFIG does not make products deterministic: it is too late to set
/// it here.
void take_deterministic_kernels(c10::Device device);
/// Sets that variable where it is not set. Call it before CUDA is used, as the program starts.
void prepare_deterministic_products();
/// Whether backwards of this thread stay on it.
bool backward_stays_here();

}  // namespace tessera::comm
