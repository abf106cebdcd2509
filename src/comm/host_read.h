// read_on_host: where the host waits for a device.
//
// Work on a device is launched and goes on by itself: collectives too, whose wait() blocks a stream
// and not the host. So one that never ends holds nobody up until something is read, and that is
// here: the wait stands on the wait board, ends with the World's abort, and says after
// comm.timeout_seconds which collective has not ended. Reading by any other way (item(), a blocking
// copy) would stand still without a word. It asks an event again and again and never synchronizes:
// a call of the driver that blocks cannot be ended. Next: stream.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBody.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "comm/stream.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"

namespace tessera::comm {

/// What a rank's threads need to wait for its device. Lent by its World (World::attach_thread).
/// Threads: any.
class HostWaits {
 public:
  HostWaits(std::shared_ptr<AbortFlag> abort_flag, std::shared_ptr<WaitBoard> board,
            std::chrono::milliseconds timeout);

  /// A collective or a message whose end a stream of this rank waits for: what a read that does not
  /// come back is blamed on. `what` is called there.
  void waited_for(std::function<PeerWait()> what, Event end);
  /// Until the event has passed. Errors: LostRank naming the first of these that has not ended,
  /// after the World's timeout; or with why the World was aborted.
  void wait(const Event& event, std::string_view what);

  /// The calling thread's from now on, as long as its World lives.
  static void attach(const std::shared_ptr<HostWaits>& waits);
  /// Null where no World that lives has attached the thread.
  static std::shared_ptr<HostWaits> of_this_thread();

 private:
  class Standing;
  struct UnderWay {
    std::function<PeerWait()> what;
    Event end;
  };
  void forget_ended() TESSERA_REQUIRES(mutex_);

  const std::shared_ptr<AbortFlag> abort_flag_;
  const std::shared_ptr<WaitBoard> board_;
  const std::chrono::milliseconds timeout_;
  base::Mutex mutex_;
  std::deque<UnderWay> under_way_ TESSERA_GUARDED_BY(mutex_);  // the oldest first
  std::uint64_t ended_ TESSERA_GUARDED_BY(mutex_) = 0;         // so many have gone from it
};

/// As HostWaits::wait() of the calling thread's; a thread without a World waits by itself.
void wait_on_host(const Event& event, std::string_view what);
/// Pinned memory of the host of a tensor's sizes and dtype.
at::Tensor pinned_like(const at::Tensor& tensor);

/// The same values on the device, by pinned memory and behind what is launched on the caller's stream:
/// the host does not wait. Itself where it lies there; on the CPU always.
at::Tensor uploaded(const at::Tensor& tensor, at::Device device);

/// The same values in the host's memory, contiguous, in the same order: one wait for all. Those of
/// the CPU come back as they are, undefined ones too; the others are of one device. `what` is said
/// in errors: "gradient norm". Errors: as HostWaits::wait().
std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what);
at::Tensor read_on_host(const at::Tensor& tensor, std::string_view what);

}  // namespace tessera::comm
