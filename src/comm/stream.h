// Stream, StreamScope, Event, Uses: the order of what a device does.
//
// Work that is launched on one stream is done in that order; work of two streams in any, unless an
// event was recorded on the one and the other blocks on it. None of these calls lets the host wait.
// Over c10's generic streams and events: no header of CUDA is needed, and whatever accelerator
// libtorch knows is served. On the CPU, where work is done once the call returns, all of them are
// empty: nothing is allocated and nobody is asked.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

/// Why an event is there: each place where the library orders two streams. A test leaves out one
/// after the other, and the simulated device has to find each (tests/sim).
enum class EventSite : std::uint8_t {
  kIssue,     ///< a group's stream is ordered after the caller's, which made what is sent
  kWorkEnd,   ///< the caller's stream is ordered after the collective
  kPeers,     ///< ranks of one process: streams that read each other's memory
  kP2PPost,   ///< the stream of a message is ordered after what was launched before it was posted
  kP2PEnd,    ///< the caller's stream is ordered after the message
  kPoolBack,  ///< who takes a block is ordered after its last use
  kPoolFree,  ///< the allocator's stream is ordered after the last use of a block that is freed
  kPoolMade,  ///< who takes a new block is ordered after what its memory was before
  kGather,    ///< a second stream that uses gathered parameters, and who gives them back
  kAccept,    ///< gradients that several streams add: each behind the last one, and the reduction
  kDeferred,  ///< a weight gradient that is formed on another stream than it was put off on
  kReduced,   ///< who reads a sum is ordered after its reductions
  kHostRead,  ///< the host is ordered after the copy that it reads
  kSnapshot,  ///< the copy of a checkpoint is ordered after what it copies
  kSnapshotEnd,  ///< who writes that next, and who writes the file, is ordered after the copy
};
std::string_view to_string(EventSite site);
/// Which half of one: test_hooks::leaves_out_event.
enum class EventEnd : std::uint8_t { kRecord, kBlock };

/// What a stream is for. libtorch has a few streams of CUDA for each priority, which all users of a
/// process share: those by which ranks wait for each other have theirs, and of a higher one.
enum class StreamUse : std::uint8_t { kRank, kOtherRanks };
/// Of a device whose `made`-th stream of that use was just made: a warning where it is the first one
/// that is somebody's already, else "".
std::string shared_stream_warning(c10::Device device, StreamUse use, int made);

class Stream {
 public:
  Stream() = default;
  explicit Stream(const c10::Stream& stream) : stream_(stream) {}

  /// The calling thread's current one of the device; without an index: of its current device.
  static Stream current(c10::Device device) {
    return device.is_cpu() ? Stream() : current_of(device);
  }
  /// A new one; of CUDA, where many were made, one that was made before: the first time that is said.
  static Stream make(c10::Device device, StreamUse use = StreamUse::kRank) {
    return device.is_cpu() ? Stream() : made_of(device, use);
  }

  explicit operator bool() const { return stream_.has_value(); }
  c10::Device device() const { return stream_ ? stream_->device() : c10::Device(c10::kCPU); }
  const c10::Stream& get() const { return *stream_; }  ///< not of an empty one

  friend bool operator==(const Stream& one, const Stream& other) {
    return one.stream_ == other.stream_;
  }

 private:
  static Stream current_of(c10::Device device);
  static Stream made_of(c10::Device device, StreamUse use);

  std::optional<c10::Stream> stream_;
};

/// While it lives, the stream is the thread's current one, and its device the current device. Of an
/// empty one: nothing changes.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream) {
    if (stream) guard_.emplace(stream.get());
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// The same of several at once: of each device the first one. The current device stays. None are
/// empty.
class StreamsScope {
 public:
  explicit StreamsScope(std::span<const Stream> streams);

 private:
  c10::MultiStreamGuard guard_;
};

/// A point in a stream's work. Copies mark the same point, whatever the original marks later.
/// Threads: one at a time; copies are independent.
class Event {
 public:
  /// Behind all that was launched on `stream` so far; nothing, of an empty one.
  void record(const Stream& stream, EventSite site);
  /// What is launched on `stream` from now on is ordered after the point. An empty stream does not wait.
  void block(const Stream& stream, EventSite site) const {
    if (event_ != nullptr && stream) block_on(stream, site);
  }
  /// Whether it has been passed: also if it marks nothing. Never waits.
  bool done() const { return event_ == nullptr || event_->query(); }

 private:
  void block_on(const Stream& stream, EventSite site) const;

  std::shared_ptr<c10::Event> event_;
};

/// What is launched on `later` from now on is ordered after what was launched on `earlier` so far.
/// Nothing, where they are one stream, or either is empty.
inline void order(const Stream& earlier, const Stream& later, EventSite site) {
  if (!earlier || !later || earlier == later) return;
  Event reached;
  reached.record(earlier, site);
  reached.block(later, site);
}

/// The streams that use some memory, the one first that made it ready. An event is recorded when a
/// second stream comes, and not when the first one is done: so it may be behind more than was
/// needed, and costs nothing where no second one comes. Threads: one at a time.
class Uses {
 public:
  /// `stream` uses it, too, behind what the first one has done. Again: nothing happens.
  void enter(const Stream& stream, EventSite site) {
    if (stream && !has(stream)) enter_new(stream, site);
  }
  /// `stream` uses it, and is ordered after the first one by itself.
  void note(const Stream& stream) {
    if (stream && !has(stream)) streams_.push_back(stream);
  }
  /// `stream` is ordered after all that use it, and is the first one from now on.
  void join(const Stream& stream, EventSite site);
  /// It is other memory now.
  void clear() { streams_.clear(); }

 private:
  bool has(const Stream& stream) const;
  void enter_new(const Stream& stream, EventSite site);

  std::vector<Stream> streams_;
};

}  // namespace tessera::comm
