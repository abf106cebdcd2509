// read_on_host: the place where the host waits for a device.
//
// Work on a device is launched and runs without the host: collectives too, whose wait() blocks a
// stream and not the host. So one that never ends blocks no thread until something is read, and
// that happens here: the wait is on the wait board, ends with the World's abort, and after
// comm.timeout_seconds says which collective has not ended. Reading in any other way (item(), a
// blocking copy) would silently wait for ever. The wait queries an event repeatedly and never
// synchronizes: a driver call that blocks cannot be ended.
//
// A rank that continues to launch after a collective that never ends reaches no read: a device
// takes some thousand launches, then a launch blocks in the driver, as one may that has to connect
// to a lost rank. So the failure watch also queries, on its own thread. Next: stream.h.
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

/// A collective or a message on a device, for errors that say what does not end. Any thread may
/// call its functions.
struct DeviceWork {
  std::function<PeerWait()> what;
  /// Says why it can no longer end, as its library has found; "" while it may. Empty: unknown.
  std::function<std::string()> error = {};
};

/// Waits for the device of a rank, for all threads of the rank. Its World attaches it to them
/// (World::attach_thread). Threads: any.
class HostWaits final : public DeviceWatch {
 public:
  HostWaits(std::shared_ptr<AbortFlag> abort_flag, std::shared_ptr<WaitBoard> board,
            std::chrono::milliseconds timeout, at::Device device);

  /// Records work that was launched before, and for whose end a stream of this rank waits.
  void waited_for(DeviceWork work, Event end) {
    launched(launching(std::move(work)), std::move(end));
  }
  /// Returns when the event has passed. Errors: LostRank naming the first recorded work that has
  /// not ended, after the World's timeout; or with the reason for which the World was aborted.
  void wait(const Event& event, std::string_view what);
  /// Returns none while a thread is in wait(): that thread reports it.
  std::optional<std::string> stalled() override;

  /// Attaches `waits` to the calling thread, as long as its World lives.
  static void attach(const std::shared_ptr<HostWaits>& waits);
  /// Returns null where no World that lives has attached the thread.
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
  /// Returns its number; none where too many are in flight.
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
  // the number of those removed from it
  std::uint64_t ended_ TESSERA_GUARDED_BY(mutex_) = 0;
  int readers_ TESSERA_GUARDED_BY(mutex_) = 0;  // threads in wait()
  // Used by the failure watch only, which destroys no event: that may take the driver's time.
  std::uint64_t seen_ended_ TESSERA_GUARDED_BY(mutex_) = 0;       // ended_ as it has seen it
  std::optional<std::uint64_t> seen_ TESSERA_GUARDED_BY(mutex_);  // the oldest that had not ended
  std::chrono::steady_clock::time_point seen_since_ TESSERA_GUARDED_BY(mutex_);
};

/// A collective while a thread launches it, which may block, and after launched() while it is in
/// flight. It counts as ended where launched() was not called.
class Launching {
 public:
  /// `waits` may be null: then nothing is recorded.
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
  Event end_;  // empty: it has ended
};

/// HostWaits::wait() of the calling thread; a thread without a World waits by itself.
void wait_on_host(const Event& event, std::string_view what);
/// Makes a tensor in pinned memory of the host, with the sizes and dtype of `tensor`.
at::Tensor pinned_like(const at::Tensor& tensor);

/// Copies a tensor of the CPU to the device, through pinned memory, ordered after what is launched
/// on the caller's stream: the host does not wait. Returns the tensor as it is where it is on a
/// device already or `device` is the CPU.
at::Tensor uploaded(const at::Tensor& tensor, at::Device device);

/// Copies tensors to the host's memory, contiguous, in the same order, with one wait for all.
/// Tensors of the CPU are returned as they are, undefined ones too; the others are of one device.
/// `what` is named in errors: "gradient norm". Errors: as HostWaits::wait().
std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what);
at::Tensor read_on_host(const at::Tensor& tensor, std::string_view what);
/// The same, copied on `stream` (empty: the caller's), which the caller has ordered, by events,
/// after what made the tensors: the host does not wait for other work that the caller has launched.
/// The tensors must live until it has returned.
std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what,
                                     const Stream& stream);

}  // namespace tessera::comm
