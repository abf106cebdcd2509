// Vector clocks of streams and host threads: which launches are known to have ended, and where.
//
// A stream is a slot, and a clock says for each slot how many of its launches have ended.
// Everything that a thread puts on a stream (a launch, a record, a block) is ordered after what the
// thread has waited for; an event carries the clock of its stream to another; a thread learns by
// waiting. Nothing orders two host threads with each other: memory that one hands to another needs
// an event, as it does between streams, unless the allocator passes it on (shadow.h).
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::sim {

using Slot = std::int32_t;

/// Counts how often Clocks was restarted: launches of an earlier epoch have ended for all. So tests
/// that follow each other in a process do not pay for the streams of earlier ones.
std::uint64_t current_epoch();

struct Clock {
  std::vector<std::uint64_t> over;  ///< by slot; a slot that is missing is at 0
  std::uint64_t epoch = current_epoch();
};

/// Knows afterwards what either knew.
void join(Clock& clock, const Clock& other);
std::uint64_t launches_over(const Clock& clock, Slot slot);
/// Whether all that `other` knows to be over is so for `clock`, too.
bool covers(const Clock& clock, const Clock& other);

/// One operation's use of some bytes.
struct Access {
  Slot stream = -1;  ///< -1: none
  std::uint64_t launch = 0;
  const std::string* operation = nullptr;
  int rank = -1;
};
/// Whether an owner of this clock is ordered after the access.
bool is_over(const Clock& clock, const Access& access);

/// Threads: the holder of the simulator's mutex, except for of_this_thread().
class Clocks {
 public:
  /// Made on first sight, and never shared: two groups on one stream would hide a missing event.
  Slot slot_of(const c10::Stream& stream);
  const c10::Stream& stream_of(Slot slot) const { return streams_.at(index(slot)).stream; }
  std::vector<Slot> slots_of(c10::DeviceIndex device) const;
  const Clock& of(Slot slot) const { return streams_.at(index(slot)).clock; }

  /// Returns the number of the launch. It is ordered after all that this thread has waited for.
  std::uint64_t launch(Slot slot);
  /// Returns the clock of an event that is recorded now.
  Clock record(Slot slot);
  /// Orders later launches after the event's.
  void block(Slot slot, const Clock& event);

  /// Forgets all streams. Slots, launches and events of before are over for every thread.
  void restart();

  /// The clock of this thread: everything that it has waited for.
  static Clock& of_this_thread();

 private:
  struct Known {
    c10::Stream stream;
    Clock clock;
  };
  static std::size_t index(Slot slot) { return static_cast<std::size_t>(slot); }

  std::vector<Known> streams_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Slot> slots_;
};

}  // namespace tessera::sim
