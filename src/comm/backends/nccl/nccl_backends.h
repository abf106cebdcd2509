// The communicators of one World: c10d's backends of NCCL, made alike, connected before anybody needs
// them, ended together.
//
// NCCL connects two ranks inside the first call that both of them make, which stands still without an
// end where the other one is lost. So that first call is made here: on a thread of its own, which is
// left to itself after comm.init_timeout_seconds, while the rank stands on the wait board, where the
// failure watch looks after the others. What NCCL connects later all the same (it has other ways for
// larger messages) is named by the failure watch (comm/host_read.h). Private to the NCCL backend.
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

/// What NCCL has noticed of a communicator by itself, "" where nothing: c10d's watchdog asks it while
/// something is under way.
std::string error_of(c10d::ProcessGroupNCCL& backend);

/// Threads: the rank's thread.
class NcclBackends {
 public:
  /// Connects nobody yet. `store` is for it alone. `own`: of the streams that c10d takes for each of
  /// its communicators, on which it carries messages; collectives run on their groups'.
  NcclBackend make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                   at::Device device, StreamUse own);
  /// Ends all of them, in the order in which they were made, behind what is under way. All ranks come
  /// to it: where one does not, it is left to itself after `patience`, with a warning. Without it
  /// c10d's destructors end what still runs.
  void close(std::chrono::milliseconds patience);

 private:
  std::vector<NcclBackend> made_;
  std::optional<at::Device> device_;
};

/// Of whom a communicator is.
struct NcclPlace {
  ChannelOptions channel;
  c10::intrusive_ptr<c10d::Store> store;  ///< of this group
  at::Device device;
  std::chrono::milliseconds init_timeout{0};
  std::shared_ptr<NcclBackends> backends;
};

/// Runs `connect`, which launches what connects this rank to others, on another thread, and waits
/// until that has ended on the device. `connect` owns what it uses. Errors: LostRank naming `what`.
void connect_in_time(const NcclPlace& place, const std::string& what,
                     std::function<void()> connect);

}  // namespace tessera::comm
