// read_on_host: where the host waits for a device.
//
// Work on a device is launched and goes on by itself: collectives too, whose wait() blocks a stream
// and not the host. So one that never ends holds nobody up until something is read, and that is
// here: the wait stands on the wait board, ends with the World's abort, and says after
// comm.timeout_seconds which collective has not ended. Reading by any other way (item(), a blocking
// copy) would stand still without a word. It asks an event again and again and never synchronizes:
// a call of the driver that blocks cannot be ended.
//
// A rank that goes on launching behind a collective that never ends comes to no read: a device takes
// some thousand launches, then a launch stands still in the driver, and so may one that has to connect
// to a rank that is lost. So the failure watch asks, too, on its own thread. Next: stream.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/TensorBody.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/stream.h"
#include "launch/abort_flag.h"
#include "launch/wait_board.h"

namespace tessera::comm {

/// A collective or a message on a device, as it is blamed for what does not go on. Each is called by
/// any thread.
struct DeviceWork {
  std::function<PeerWait()> what;
  /// Why it cannot end any more, as its library knows by itself; "" while it may. Empty: nobody knows.
  std::function<std::string()> error = {};
};

/// What a rank's threads need to wait for its device. Lent by its World (World::attach_thread).
/// Threads: any.
class HostWaits final : public DeviceWatch {
 public:
  HostWaits(std::shared_ptr<AbortFlag> abort_flag, std::shared_ptr<WaitBoard> board,
            std::chrono::milliseconds timeout, at::Device device);

  /// It was launched before, and a stream of this rank waits for its end.
  void waited_for(DeviceWork work, Event end) {
    launched(launching(std::move(work)), std::move(end));
  }
  /// Until the event has passed. Errors: LostRank naming the first of these that has not ended,
  /// after the World's timeout; or with why the World was aborted.
  void wait(const Event& event, std::string_view what);
  /// While a thread is in wait() that one tells.
  std::optional<std::string> stalled() override;

  /// The calling thread's from now on, as long as its World lives.
  static void attach(const std::shared_ptr<HostWaits>& waits);
  /// Null where no World that lives has attached the thread.
  static std::shared_ptr<HostWaits> of_this_thread();

 private:
  friend class Launching;
  class Standing;
  class Reading;
  struct UnderWay {
    DeviceWork work;
    std::optional<Event> end;  ///< none while it is being launched
    bool has_ended() const { return end && end->done(); }
    std::string error() const { return work.error ? work.error() : std::string(); }
  };
  /// Its number; none where too many are under way.
  std::optional<std::uint64_t> launching(DeviceWork work);
  void launched(std::optional<std::uint64_t> number, Event end);
  void forget_ended() TESSERA_REQUIRES(mutex_);
  std::optional<std::string> stalled_at(std::chrono::steady_clock::time_point now)
      TESSERA_REQUIRES(mutex_);

  const std::shared_ptr<AbortFlag> abort_flag_;
  const std::shared_ptr<WaitBoard> board_;
  const std::chrono::milliseconds timeout_;
  const at::Device device_;
  base::Mutex mutex_;
  std::deque<UnderWay> under_way_ TESSERA_GUARDED_BY(mutex_);  // the oldest first
  std::uint64_t ended_ TESSERA_GUARDED_BY(mutex_) = 0;         // so many have gone from it
  int readers_ TESSERA_GUARDED_BY(mutex_) = 0;                 // threads in wait()
  // Of the failure watch, which lets go of no event: that may take the driver's time.
  std::uint64_t seen_ended_ TESSERA_GUARDED_BY(mutex_) = 0;       // so many, as it has seen
  std::optional<std::uint64_t> seen_ TESSERA_GUARDED_BY(mutex_);  // the oldest that had not ended
  std::chrono::steady_clock::time_point seen_since_ TESSERA_GUARDED_BY(mutex_);
};

/// A collective while a thread launches it, which may block; from launched() on while it is under
/// way. Ended, where it has not come to that.
class Launching {
 public:
  /// `waits` may be null: then nobody is told.
  Launching(std::shared_ptr<HostWaits> waits, DeviceWork work) : waits_(std::move(waits)) {
    if (waits_) number_ = waits_->launching(std::move(work));
  }
  ~Launching() {
    if (waits_) waits_->launched(number_, std::move(end_));
  }
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;

  void launched(const Event& end) { end_ = end; }

 private:
  const std::shared_ptr<HostWaits> waits_;
  std::optional<std::uint64_t> number_;
  Event end_;  // of nothing: it has ended
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
/// The same, copied on `stream` (empty: the caller's), which is ordered after what made the tensors by
/// the caller's events: the host does not wait for what else the caller has launched. The tensors
/// live until it has returned.
std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what,
                                     const Stream& stream);

}  // namespace tessera::comm
