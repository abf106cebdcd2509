#include "comm/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/log.h"
#include "base/test_hooks.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Counts the CUDA streams of the process, as libtorch's pools are the process's; 0 for other
/// devices.
int count_one_more(c10::Device device, StreamUse use) {
  constexpr std::size_t kDevices = 128;  // beyond those of any host; others are not counted
  static std::array<std::array<std::atomic<int>, 2>, kDevices> made{};
  const auto index = static_cast<std::size_t>(device.index());
  if (!device.is_cuda() || index >= kDevices) return 0;
  return ++made[index][static_cast<std::size_t>(use)];
}

bool is_left_out(EventSite site, EventEnd end) {
  const auto hook = test_hooks::leaves_out_event.get();
  return hook && (*hook)(site, end);
}

/// Returns the first stream of each device.
std::vector<c10::Stream> one_a_device(std::span<const Stream> streams) {
  std::vector<c10::Stream> chosen;
  for (const Stream& stream : streams) {
    const bool has_one = std::ranges::any_of(
        chosen, [&](const c10::Stream& one) { return one.device() == stream.device(); });
    if (!has_one) chosen.push_back(stream.get());
  }
  return chosen;
}

}  // namespace

std::string_view to_string(EventSite site) {
  switch (site) {
    case EventSite::kIssue:
      return "issue";
    case EventSite::kWorkEnd:
      return "end of a collective";
    case EventSite::kPeers:
      return "peers";
    case EventSite::kP2PPost:
      return "message posted";
    case EventSite::kP2PEnd:
      return "end of a message";
    case EventSite::kPoolBack:
      return "block returned to its pool";
    case EventSite::kPoolFree:
      return "block freed";
    case EventSite::kPoolMade:
      return "block made";
    case EventSite::kGather:
      return "gathered parameters";
    case EventSite::kAccept:
      return "gradient added";
    case EventSite::kDeferred:
      return "deferred weight gradient";
    case EventSite::kReduced:
      return "reductions of a sum";
    case EventSite::kHostRead:
      return "read on the host";
    case EventSite::kSnapshot:
      return "copy of a checkpoint";
    case EventSite::kSnapshotEnd:
      return "end of a checkpoint's copy";
  }
  return "unknown";
}

Stream Stream::current_of(c10::Device device) {
  return Stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

Stream Stream::made_of(c10::Device device, StreamUse use) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (device.index() < 0) device = guard.getDevice();
  const std::string warning = shared_stream_warning(device, use, count_one_more(device, use));
  if (!warning.empty()) log::warn(warning);
  constexpr int kUsual = 0, kHigher = -1;
  return Stream(guard.getNewStream(device, use == StreamUse::kRank ? kUsual : kHigher));
}

std::string shared_stream_warning(c10::Device device, StreamUse use, int made) {
  // c10/cuda/CUDAStream.cpp: libtorch has so many for each priority, which are then reused in turn.
  constexpr int kStreamsOfCuda = 32;
  if (!device.is_cuda() || made != kStreamsOfCuda + 1) return "";
  return concat(
      "device ", device, ": found more than ", kStreamsOfCuda, " streams ",
      use == StreamUse::kRank ? "of the rank's computation"
                              : "of groups and messages between ranks",
      ", which is as many as libtorch has: the next ones are shared a second time, and what "
      "shares one waits for each other; expected fewer groups, or neighbours in a pipeline, "
      "in one process");
}

StreamsScope::StreamsScope(std::span<const Stream> streams) : guard_(one_a_device(streams)) {}

void Event::record(const Stream& stream, EventSite site) {
  if (!stream || is_left_out(site, EventEnd::kRecord)) {
    event_.reset();
    return;
  }
  // A copy continues to mark the old point, and an event stays on the device of its first record.
  const bool reusable = event_ != nullptr && event_.use_count() == 1 &&
                        event_->device_type() == stream.device().type() &&
                        event_->device_index() == stream.device().index();
  if (!reusable) event_ = std::make_shared<c10::Event>(stream.device().type());
  event_->record(stream.get());
}

void Event::block_on(const Stream& stream, EventSite site) const {
  if (!is_left_out(site, EventEnd::kBlock)) event_->block(stream.get());
}

bool Uses::has(const Stream& stream) const {
  return std::ranges::find(streams_, stream) != streams_.end();
}

void Uses::enter_new(const Stream& stream, EventSite site) {
  if (!streams_.empty()) order(streams_.front(), stream, site);
  streams_.push_back(stream);
}

void Uses::join(const Stream& stream, EventSite site) {
  for (const Stream& user : streams_) order(user, stream, site);
  streams_.clear();
  note(stream);
}

}  // namespace tessera::comm
