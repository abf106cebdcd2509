#include "comm/host_read.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "comm/device.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Time = std::chrono::steady_clock;

// More than a step has, so that the oldest that has not ended is always among them.
constexpr std::size_t kMostKept = 4096;
// A read that ends soon is not to cost a sleep of the thread.
constexpr auto kAsksAtOnce = std::chrono::microseconds(200);
constexpr auto kPause = std::chrono::microseconds(50);
// Copies begin at addresses that suit every dtype.
constexpr std::int64_t kAlignment = 16;

thread_local std::weak_ptr<HostWaits> waits_of_thread;  // expires with its World

/// Waits without a World, where no rank could be lost.
void ask_until_done(const Event& event) {
  base::InterruptTimer timer;
  while (!event.done()) {
    if (timer.is_due()) base::ask_interrupt();
    std::this_thread::yield();
  }
}

/// The end of an error's message.
std::string not_ended(const std::string& work) {
  return concat(", where ", work,
                " has not ended; a rank of it is stalled, or does not take part in it");
}

}  // namespace

/// A wait as the failure watch sees it. Events belong to the waiting thread, so that thread itself
/// says for what it waits.
class HostWaits::Standing final : public Blocked {
 public:
  void abort() override {}  // the thread looks at the flag
  std::optional<PeerWait> waits_for() const override {
    const base::Lock lock(mutex_);
    return oldest_;
  }
  void set(std::optional<PeerWait> oldest) {
    const base::Lock lock(mutex_);
    oldest_ = std::move(oldest);
  }

 private:
  mutable base::Mutex mutex_;
  std::optional<PeerWait> oldest_ TESSERA_GUARDED_BY(mutex_);
};

HostWaits::HostWaits(std::shared_ptr<AbortFlag> abort_flag, std::shared_ptr<WaitBoard> board,
                     std::chrono::milliseconds timeout, at::Device device)
    : abort_flag_(std::move(abort_flag)),
      board_(std::move(board)),
      timeout_(timeout),
      device_(device) {}

void HostWaits::attach(const std::shared_ptr<HostWaits>& waits) { waits_of_thread = waits; }

std::shared_ptr<HostWaits> HostWaits::of_this_thread() { return waits_of_thread.lock(); }

std::optional<std::uint64_t> HostWaits::launching(DeviceWork work) {
  const base::Lock lock(mutex_);
  if (under_way_.size() == kMostKept) forget_ended();
  if (under_way_.size() == kMostKept) return std::nullopt;
  under_way_.push_back({std::move(work), std::nullopt});
  return ended_ + under_way_.size() - 1;
}

void HostWaits::launched(std::optional<std::uint64_t> number, Event end) {
  if (!number) return;
  const base::Lock lock(mutex_);
  under_way_[*number - ended_].end = std::move(end);
}

void HostWaits::forget_ended() {
  for (; !under_way_.empty() && under_way_.front().has_ended(); ++ended_) under_way_.pop_front();
}

std::optional<std::string> HostWaits::stalled() {
  if (abort_flag_->is_set()) return std::nullopt;
  // A thread that calls CUDA without a current device makes a context on the first device.
  use_device(device_);
  const base::Lock lock(mutex_);
  if (readers_ > 0) return std::nullopt;
  try {
    return stalled_at(Time::now());
  } catch (const std::exception&) {
    return std::nullopt;  // the device has failed: the next launch reports it
  }
}

std::optional<std::string> HostWaits::stalled_at(Time::time_point now) {
  seen_ended_ = std::max(seen_ended_, ended_);
  const std::uint64_t all = ended_ + under_way_.size();
  while (seen_ended_ < all && under_way_[seen_ended_ - ended_].has_ended()) ++seen_ended_;
  const auto seen = seen_ended_ < all ? std::optional(seen_ended_) : std::nullopt;
  if (std::exchange(seen_, seen) != seen) seen_since_ = now;
  if (!seen) return std::nullopt;
  const UnderWay& oldest = under_way_[*seen - ended_];
  const std::string text = oldest.work.what().text;
  if (const std::string error = oldest.error(); !error.empty()) return concat(text, ": ", error);
  const auto patience = abort_flag_->patience.of(timeout_);
  if (now - seen_since_ < patience) return std::nullopt;
  return concat("device: found no collective that has ended for ", in_seconds(patience),
                not_ended(text));
}

/// A wait on the board, by a thread that reads.
class HostWaits::Reading {
 public:
  explicit Reading(HostWaits& waits) : waits_(waits), on_board_(*waits.board_, standing) {
    const base::Lock lock(waits_.mutex_);
    ++waits_.readers_;
  }
  ~Reading() {
    const base::Lock lock(waits_.mutex_);
    --waits_.readers_;
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  Standing standing;

 private:
  HostWaits& waits_;
  OnBoard on_board_;
};

void HostWaits::wait(const Event& event, std::string_view what) {
  Reading reading(*this);
  const auto patience = abort_flag_->patience.of(timeout_);
  const auto begin = Time::now();
  const auto give_up = [&](const std::string& why) {
    abort_flag_->suspect(why);
    throw LostRank(why);
  };
  std::optional<std::uint64_t> named;  // the number of the oldest; none: there was none
  base::InterruptTimer timer;
  while (!event.done()) {
    abort_flag_->check();
    abort_flag_->ask_interrupt(timer);
    const auto waited = Time::now() - begin;
    if (waited < kAsksAtOnce) {
      std::this_thread::yield();
      continue;
    }
    std::string error;
    {
      const base::Lock lock(mutex_);
      forget_ended();
      const auto number = under_way_.empty() ? std::nullopt : std::optional(ended_);
      if (std::exchange(named, number) != number) {
        reading.standing.set(number ? std::optional(under_way_.front().work.what()) : std::nullopt);
      }
      if (number) error = under_way_.front().error();
    }
    if (error.empty() && waited < patience) {
      std::this_thread::sleep_for(kPause);
      continue;
    }
    const auto oldest = reading.standing.waits_for();
    if (!error.empty()) give_up(concat(what, ": ", oldest->text, ": ", error));
    give_up(concat(what, ": waited ", in_seconds(patience), " for the device",
                   oldest ? not_ended(oldest->text)
                          : "; no collective is under way there: a kernel does not end"));
  }
  const base::Lock lock(mutex_);
  forget_ended();
}

void wait_on_host(const Event& event, std::string_view what) {
  if (const auto waits = HostWaits::of_this_thread()) {
    waits->wait(event, what);
  } else {
    ask_until_done(event);
  }
}

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
}

at::Tensor uploaded(const at::Tensor& tensor, at::Device device) {
  if (device.is_cpu() || !tensor.is_cpu()) return tensor;
  const at::Tensor pinned = pinned_like(tensor);
  pinned.copy_(tensor);
  return pinned.to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what,
                                     const Stream& stream) {
  RECORD_USER_SCOPE("tessera::host_read");
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> read(tensors.begin(), tensors.end());
  std::optional<at::Device> device;
  std::int64_t bytes = 0;
  for (at::Tensor& tensor : read) {
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    if (tensor.is_cpu()) {
      tensor = tensor.contiguous();
      continue;
    }
    TESSERA_INVARIANT(!device || *device == tensor.device(), what, ": found tensors on ", *device,
                      " and ", tensor.device(), ", expected one device");
    device = tensor.device();
    bytes += static_cast<std::int64_t>(tensor.nbytes()) + kAlignment;
  }
  if (!device) return read;
  const StreamScope here_on(stream);
  const at::Tensor pinned = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::int64_t begin = 0;
  for (at::Tensor& tensor : read) {
    if (!tensor.defined() || tensor.is_cpu()) continue;
    const auto size = static_cast<std::int64_t>(tensor.nbytes());
    const at::Tensor here =
        pinned.narrow(0, begin, size).view(tensor.scalar_type()).view(tensor.sizes());
    here.copy_(tensor, /*non_blocking=*/true);
    begin += (size + kAlignment - 1) / kAlignment * kAlignment;
    tensor = here;
  }
  Event end;
  end.record(Stream::current(*device), EventSite::kHostRead);
  wait_on_host(end, what);
  return read;
}

std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what) {
  return read_on_host(tensors, what, Stream());
}

at::Tensor read_on_host(const at::Tensor& tensor, std::string_view what) {
  return read_on_host(at::TensorList(tensor), what).front();
}

}  // namespace tessera::comm
