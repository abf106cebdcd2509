// The device of a rank: which one it takes, and what its thread has to know of it.
//
// Ranks of a host take one device each, by their number on it; where only one is visible (Slurm and
// containers show each rank its own) they take that. Over c10's generic guards: no header of CUDA.
// Next: stream.h.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace tessera::comm {

class Store;

/// Which of the devices that are visible a local rank takes: none where they are too few.
std::optional<int> device_number(int local_rank, int visible);
/// WorldOptions::device of a local rank. On the CPU there is no index, else it is always set.
/// Errors: kUsage where libtorch knows no such device, sees none, or has too few for the rank.
c10::Device device_of_rank(const std::string& name, int local_rank);

/// Says in the store of a World that this rank computes on a device of a host, for backends that want
/// one for each rank. `host`, where it is "", cannot be told, and nothing is compared. Errors: kUsage
/// where another rank computes on the same, naming both.
void claim_device(Store& store, const std::string& host, const std::string& device, int rank);

/// From now on the calling thread computes there: the device is its current one, and a backward
/// that it begins stays on it. Autograd has one thread a device, on which ranks that share one would
/// wait for each other for ever, and where hooks and markers had other streams and other
/// thread-locals. Not of the CPU, whose backward stays on its thread anyway.
void use_device(c10::Device device);
/// Whether backwards of this thread stay on it.
bool backward_stays_here();

}  // namespace tessera::comm
