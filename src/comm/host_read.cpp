#include "comm/host_read.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Time = std::chrono::steady_clock;

// More than a step has, so that the oldest one that has not ended is always among them.
constexpr std::size_t kMostKept = 4096;
// A read that comes soon is not to pay for a sleep of the thread.
constexpr auto kAsksAtOnce = std::chrono::microseconds(200);
constexpr auto kPause = std::chrono::microseconds(50);
// Copies begin where any dtype may.
constexpr std::int64_t kAlignment = 16;

thread_local std::weak_ptr<HostWaits> waits_of_thread;  // it goes with its World

/// Without a World there is nobody who could be lost.
void ask_until_done(const Event& event) {
  while (!event.done()) std::this_thread::yield();
}

}  // namespace

/// A wait as the failure watch sees it: events belong to the thread that waits, so it says by itself
/// what it waits for.
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
                     std::chrono::milliseconds timeout)
    : abort_flag_(std::move(abort_flag)), board_(std::move(board)), timeout_(timeout) {}

void HostWaits::attach(const std::shared_ptr<HostWaits>& waits) { waits_of_thread = waits; }

std::shared_ptr<HostWaits> HostWaits::of_this_thread() { return waits_of_thread.lock(); }

void HostWaits::waited_for(std::function<PeerWait()> what, Event end) {
  const base::Lock lock(mutex_);
  if (under_way_.size() == kMostKept) forget_ended();
  if (under_way_.size() < kMostKept) under_way_.push_back({std::move(what), std::move(end)});
}

void HostWaits::forget_ended() {
  for (; !under_way_.empty() && under_way_.front().end.done(); ++ended_) under_way_.pop_front();
}

void HostWaits::wait(const Event& event, std::string_view what) {
  Standing standing;
  const OnBoard on_board(*board_, standing);
  const auto patience = abort_flag_->patience.of(timeout_);
  const auto begin = Time::now();
  const auto give_up = [&](const std::string& why) {
    abort_flag_->suspect(why);
    throw LostRank(why);
  };
  std::optional<std::uint64_t> named;  // the number of the oldest; none: there was none
  while (!event.done()) {
    abort_flag_->check();
    const auto waited = Time::now() - begin;
    if (waited < kAsksAtOnce) {
      std::this_thread::yield();
      continue;
    }
    {
      const base::Lock lock(mutex_);
      forget_ended();
      const auto oldest = under_way_.empty() ? std::nullopt : std::optional(ended_);
      if (named != oldest) {
        named = oldest;
        standing.set(oldest ? std::optional(under_way_.front().what()) : std::nullopt);
      }
    }
    if (waited >= patience) {
      const auto oldest = standing.waits_for();
      give_up(concat(what, ": waited ", in_seconds(patience), " for the device",
                     oldest ? concat(", where ", oldest->text,
                                     " has not ended; a rank of it is stalled, or does not take "
                                     "part in it")
                            : "; no collective is under way there: a kernel does not end"));
    }
    std::this_thread::sleep_for(kPause);
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

std::vector<at::Tensor> read_on_host(at::TensorList tensors, std::string_view what) {
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

at::Tensor read_on_host(const at::Tensor& tensor, std::string_view what) {
  return read_on_host(at::TensorList(tensor), what).front();
}

}  // namespace tessera::comm
