// Stream, StreamScope, Event, Uses: the order of what a device does.
//
// Work that is launched on one stream is done in that order; work of two streams in any order,
// unless an event was recorded on one stream and the other blocks on it. None of these calls makes
// the host wait. The classes use c10's generic streams and events: they need no CUDA header and
// serve every accelerator that libtorch knows. On the CPU, where work is done once the call
// returns, all of them are empty: they allocate and query nothing.
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

/// Why an event exists: each place where the library orders two streams. A test leaves out one
/// after the other, and the simulated device has to detect each (tests/sim).
enum class EventSite : std::uint8_t {
  kIssue,     ///< a group's stream is ordered after the caller's, which made what is sent
  kWorkEnd,   ///< the caller's stream is ordered after the collective
  kPeers,     ///< ranks of one process: streams that read each other's memory
  kP2PPost,   ///< the stream of a message is ordered after what was launched before it was posted
  kP2PEnd,    ///< the caller's stream is ordered after the message
  kPoolBack,  ///< the next user of a block is ordered after its last use
  kPoolFree,  ///< the allocator's stream is ordered after the last use of a block that is freed
  kPoolMade,  ///< the first user of a new block is ordered after what its memory was before
  kGather,    ///< a second stream that uses gathered parameters, and the reshard after it
  /// gradients that several streams add: each is ordered after the last one, and the reduction
  kAccept,
  kDeferred,  ///< a weight gradient that is formed on another stream than the one that deferred it
  kReduced,   ///< the reader of a sum is ordered after its reductions
  kHostRead,  ///< the host is ordered after the copy that it reads
  kSnapshot,  ///< the copy of a checkpoint is ordered after what it copies
  /// the next writer of that, and the writer of the file, are ordered after the copy
  kSnapshotEnd,
};
std::string_view to_string(EventSite site);
/// One half of such an event: test_hooks::leaves_out_event.
enum class EventEnd : std::uint8_t { kRecord, kBlock };

/// The purpose of a stream. libtorch has a few CUDA streams for each priority, which all users of a
/// process share. Streams by which ranks wait for each other have a higher priority, so they share
/// none with the rest.
enum class StreamUse : std::uint8_t { kRank, kOtherRanks };
/// Returns a warning where the `made`-th stream of a device for that use, just made, is the first
/// one that has another user already; else "".
std::string shared_stream_warning(c10::Device device, StreamUse use, int made);

class Stream {
 public:
  Stream() = default;
  explicit Stream(const c10::Stream& stream) : stream_(stream) {}

  /// The calling thread's current stream of the device; without an index: of its current device.
  static Stream current(c10::Device device) {
    return device.is_cpu() ? Stream() : current_of(device);
  }
  /// Makes a stream. Where many CUDA streams were made it is one that exists already: warns once.
  static Stream make(c10::Device device, StreamUse use = StreamUse::kRank) {
    return device.is_cpu() ? Stream() : made_of(device, use);
  }

  explicit operator bool() const { return stream_.has_value(); }
  c10::Device device() const { return stream_ ? stream_->device() : c10::Device(c10::kCPU); }
  const c10::Stream& get() const { return *stream_; }  ///< must not be empty

  friend bool operator==(const Stream& one, const Stream& other) {
    return one.stream_ == other.stream_;
  }

 private:
  static Stream current_of(c10::Device device);
  static Stream made_of(c10::Device device, StreamUse use);

  std::optional<c10::Stream> stream_;
};

/// Makes the stream the thread's current one, and its device the current device, while the scope
/// lives. An empty stream changes nothing.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream) {
    if (stream) guard_.emplace(stream.get());
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

/// The same for several streams, the first one of each device. The current device stays. None is
/// empty.
class StreamsScope {
 public:
  explicit StreamsScope(std::span<const Stream> streams);

 private:
  c10::MultiStreamGuard guard_;
};

/// A point in a stream's work. A copy marks the same point, whichever the original marks later.
/// Threads: one at a time; copies are independent.
class Event {
 public:
  /// Marks the point after all that was launched on `stream` so far; an empty stream has none.
  void record(const Stream& stream, EventSite site);
  /// Orders what is launched on `stream` from now on after the point. An empty stream does not
  /// wait.
  void block(const Stream& stream, EventSite site) const {
    if (event_ != nullptr && stream) block_on(stream, site);
  }
  /// Whether the point has passed; true where the event marks nothing. Never waits.
  bool done() const { return event_ == nullptr || event_->query(); }

 private:
  void block_on(const Stream& stream, EventSite site) const;

  std::shared_ptr<c10::Event> event_;
};

/// Orders what is launched on `later` from now on after what was launched on `earlier` so far. Does
/// nothing where they are the same stream or either is empty.
inline void order(const Stream& earlier, const Stream& later, EventSite site) {
  if (!earlier || !later || earlier == later) return;
  Event reached;
  reached.record(earlier, site);
  reached.block(later, site);
}

/// The streams that use some memory; the first one has made it ready. An event is recorded when a
/// second stream comes, and not when the first one is done: so it may wait for more than was
/// needed, and costs nothing where no second stream comes. Threads: one at a time.
class Uses {
 public:
  /// Makes `stream` a user, ordered after what the first one has done. A second call does nothing.
  void enter(const Stream& stream, EventSite site) {
    if (stream && !has(stream)) enter_new(stream, site);
  }
  /// Notes a user that is ordered after the first one already.
  void note(const Stream& stream) {
    if (stream && !has(stream)) streams_.push_back(stream);
  }
  /// Orders `stream` after all users; it is the first one from now on.
  void join(const Stream& stream, EventSite site);
  /// Forgets all users: the memory is new.
  void clear() { streams_.clear(); }

 private:
  bool has(const Stream& stream) const;
  void enter_new(const Stream& stream, EventSite site);

  std::vector<Stream> streams_;
};

}  // namespace tessera::comm
