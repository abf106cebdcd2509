// NcclBackends: the communicators of one World. They are c10d's NCCL backends, made alike,
// connected before they are needed, and ended together.
//
// NCCL connects two ranks inside the first call that both of them make, which blocks without end
// where the other rank is lost. So that first call is made here, on a separate thread, which is
// abandoned after comm.init_timeout_seconds; meanwhile the rank is on the wait board, where the
// failure watch observes the others. The failure watch (comm/host_read.h) names what NCCL connects
// later (it connects differently for larger messages). Private to the NCCL backend.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <vector>

#include "comm/backends/gloo/transport.h"
#include "comm/stream.h"

namespace tessera::comm {

using NcclBackend = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

/// An error that NCCL has found in a communicator, "" where there is none: c10d's watchdog queries
/// NCCL while something is in flight.
std::string error_of(c10d::ProcessGroupNCCL& backend);

/// Threads: the rank's thread.
class NcclBackends {
 public:
  /// Makes a communicator; it connects no rank yet. `store` is for it alone. `own` are the streams
  /// that c10d takes for each communicator and on which it carries messages; collectives run on the
  /// streams of their groups.
  NcclBackend make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                   at::Device device, StreamUse own);
  /// Ends all communicators, in the order in which they were made, after what is in flight. All
  /// ranks must call it: where one does not, a communicator is abandoned after `patience`, with a
  /// warning. Without this call c10d's destructors end what still runs.
  void close(std::chrono::milliseconds patience);

 private:
  std::vector<NcclBackend> made_;
  std::optional<at::Device> device_;
};

/// The ranks of a communicator.
struct NcclPlace {
  ChannelOptions channel;
  c10::intrusive_ptr<c10d::Store> store;  ///< the group's store
  at::Device device;
  std::chrono::milliseconds init_timeout{0};
  std::shared_ptr<NcclBackends> backends;
};

/// Runs `connect`, which launches what connects this rank to others, on another thread, and waits
/// until that has ended on the device. `connect` owns what it uses. Errors: LostRank naming `what`.
void connect_in_time(const NcclPlace& place, const std::string& what,
                     std::function<void()> connect);

}  // namespace tessera::comm
