// A simulated accelerator: devices sim:0, sim:1, ... that find what a GPU would show now and then.
//
// A kernel runs at once, on the CPU, over the device's memory; streams and events are vector
// clocks, and every operation notes which bytes it reads and writes. The argument: kernels run in
// the host's order, which is one of the orders that the events allow; if no two accesses of the
// same bytes, one of them a write, are unordered by the events, every order that the events allow
// leaves the same memory. So a program without a report has the bits of the CPU's kernels under
// any timing, and one that leaves a wait out is reported at the first access that needed it, each
// time, however lucky the timing.
//
// In addition to races it finds the host accessing device memory (a fault that names the owner),
// memory that is used again while another stream reads it (blocks are reused at once, filled with
// NaN), copies to the host that are read before they are waited for, and what CUDA refuses: tensors
// of several devices, draws from the device's own generator. It does not show speed, nor what no
// operation shows (a pointer handed to a library faults instead).
//
// Test programs link it (tessera_test(... SIM)); environment.cpp installs it. The parts: clocks.h
// order, shadow.h accesses, simulator.h both under one mutex, memory.h device memory, pinned.h host
// memory, late_copies.h copies in flight, guard.cpp streams and events for libtorch, hooks.cpp the
// rest of the device, fallback.cpp any operation, operations.cpp those written by hand,
// single_operations.cpp those that are one kernel on a GPU and none on a CPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::sim {

/// Once, before any tensor is there: libtorch asks for the number of devices once, too.
void install(int devices);

/// sim:index.
c10::Device device(int index);

/// That were made so far.
int streams_of_higher_priority(int device);

/// Thrown by the operation that makes the second access of an unordered pair.
struct Race : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Returns what was reported since the last call, also where a caller swallowed the exception.
std::vector<std::string> take_races();

/// All that was launched is over, and every thread knows it: between two tests, and after a fault
/// that was planted.
void settle();

/// The rank whose thread this is: named in reports, and its operations are counted apart.
class RankScope {
 public:
  explicit RankScope(int rank);
  ~RankScope();
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;

 private:
  const int before_;
};

/// By name: "mm.out", "copy_"; "equal", "blocking read", "synchronize event".
struct Counts {
  std::map<std::string, std::int64_t> launches;
  std::map<std::string, std::int64_t> waits;  ///< for which the host stood still
};
/// Returns the counts of this thread's rank since the last call.
Counts take_counts();
/// The same, launches on one stream alone: what a rank computes, without what its groups send.
Counts take_counts(const c10::Stream& launches_on);

/// While it lives, nothing that is launched on the stream ends, nor what waits for it, as for a
/// collective whose peer never comes. A thread that synchronizes with it waits, too; so does a
/// launch after too many that cannot begin: a GPU takes some thousand, and a thread that launches
/// more stays in the driver.
class HeldStream {
 public:
  static constexpr int kAnyLaunches = std::numeric_limits<int>::max();
  explicit HeldStream(const c10::Stream& stream, int most_launches = kAnyLaunches);
  ~HeldStream();
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

 private:
  std::int32_t slot_ = -1;  // clocks.h
  std::uint64_t launch_ = 0;
  const int room_before_;
};

/// The answer of an event that is queried and not waited for. Both happen on a GPU: code that works
/// under only one of them relies on time. kOnlyWhenWaited: not yet, except for a thread that
/// queries repeatedly and launches, records and blocks nothing meanwhile, which is a way to wait.
enum class Done { kAtOnce, kOnlyWhenWaited };
void set_done(Done done);

/// While one lives, the device's own generator may be drawn from. Its numbers follow from seed and
/// offset, as a GPU's do.
class AllowDraws {
 public:
  AllowDraws();
  ~AllowDraws();
  AllowDraws(const AllowDraws&) = delete;
  AllowDraws& operator=(const AllowDraws&) = delete;
};

/// While it lives, a device has no more than `bytes` in all.
class CapacityScope {
 public:
  CapacityScope(int device, std::size_t bytes);
  ~CapacityScope();
  CapacityScope(const CapacityScope&) = delete;
  CapacityScope& operator=(const CapacityScope&) = delete;

 private:
  const int device_;
  const std::size_t before_;
};
/// Bytes of tensors; freed blocks are not counted.
std::int64_t live_bytes(int device);
std::int64_t peak_bytes(int device);

}  // namespace tessera::sim
