// The device of a rank: which one it takes, and what its thread has to know of it.
//
// Ranks of a host take one device each, by their number on it; where only one is visible (Slurm and
// containers show each rank its own) they take that. Over c10's generic guards: no header of CUDA.
// Next: stream.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

class Store;

/// Which of the devices that are visible a local rank takes: none where they are too few.
std::optional<int> device_number(int local_rank, int visible);
/// How many CUDA devices this process sees; 0 without a driver, or in a libtorch without CUDA.
int cuda_devices();
/// WorldOptions::device for the `ranks` that own spawn is to start on a host that shows its CUDA
/// devices to all of them: "cpu" where "auto" is asked for and each cannot have one, else `name`.
/// Ranks share the device that `name` numbers ("cuda:0"), and the only one if `backend` is gloo.
/// Errors: kUsage where "cuda" finds too few.
std::string device_of_spawned(const std::string& name, const std::string& backend, int ranks,
                              int devices);
/// WorldOptions::device of a local rank. On the CPU there is no index, else it is always set.
/// Errors: kUsage where libtorch knows no such device, sees none, or has too few for the rank.
c10::Device device_of_rank(const std::string& name, int local_rank);

/// What is known of a device beside its number; "" and 0 where nobody can tell.
struct DeviceFacts {
  std::string name;    ///< "NVIDIA H100 80GB HBM3"
  int capability = 0;  ///< of CUDA: 90 for 9.0
};
DeviceFacts facts_of(c10::Device device);

/// Bytes of a device's memory that this process has taken. Not of the CPU.
struct DeviceMemory {
  std::int64_t held = 0;      ///< by tensors that live
  std::int64_t peak = 0;      ///< the most that tensors held at once
  std::int64_t reserved = 0;  ///< the most that the allocator took, its free blocks included
};
DeviceMemory memory_of(c10::Device device);
/// From here on its two peaks are those of what comes.
void begin_memory_peaks(c10::Device device);
/// Bytes of the whole device, whoever has them; none where libtorch does not say.
std::optional<std::int64_t> memory_size(c10::Device device);
/// Lets libtorch's allocator grow its segments instead of asking for one more beside them, whose free
/// rest a tensor of another size cannot take: PYTORCH_CUDA_ALLOC_CONF, where nobody has said what the
/// allocator is to do. Before CUDA is used, as the program starts.
void prepare_growing_segments();

/// Says in the store of a World that this rank computes on a device of a host, for backends that want
/// one for each rank. `host`, where it is "", cannot be told, and nothing is compared. Errors: kUsage
/// where another rank computes on the same, naming both.
void claim_device(Store& store, const std::string& host, const std::string& device, int rank);

/// Says in the store of a World on what kind of device this rank computes, by which backend: before
/// its ranks meet. `kind`: "cuda by nccl".
void tell_device_kind(Store& store, const std::string& kind, int rank);
/// Behind the meeting: "" where all ranks said the same, else the refusal, which names two of them and
/// is the same on every rank. "auto" goes by what a host has, and ranks of two kinds would wait for
/// each other until the timeout.
std::string differing_device_kinds(Store& store);

/// From now on the calling thread computes there: the device is its current one, and a backward
/// that it begins stays on it. Autograd has one thread a device, on which ranks that share one would
/// wait for each other for ever, and where hooks and markers had other streams and other
/// thread-locals. Not of the CPU, whose backward stays on its thread anyway.
void use_device(c10::Device device);
/// Of a device: sums that do not vary from run to run. Operations whose kernels do not offer that
/// throw from now on: kernels that could (flash attention's backward) do not where libtorch is only
/// to warn. For the whole process. Not of the CPU, whose kernels are like that. Errors: kUsage on
/// CUDA where CUBLAS_WORKSPACE_CONFIG does not make products so, for which it is too late here.
void take_deterministic_kernels(c10::Device device);
/// Sets that variable where it is not set: before CUDA is used, as the program starts.
void prepare_deterministic_products();
/// Whether backwards of this thread stay on it.
bool backward_stays_here();

}  // namespace tessera::comm
