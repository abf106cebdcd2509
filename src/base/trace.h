// Trace: the work of one rank in one step, as spans of time in rows; and the file of such traces.
// Pure.
//
// Nearly always there is none: code that could add a span calls current_trace() and does nothing
// else. A trace is made for single steps (train/report/observers.h). It belongs to a thread, as a
// rank does: forward, backward, waits and updates run on the rank's thread, and a collective takes
// the trace to the issuing thread (comm/queue.h).
//
// The file is Chrome's trace-event JSON, which ui.perfetto.dev opens: one process a rank, one
// thread a row. Only complete events ("X") and names ("M") are used; times are microseconds from
// the origin. Source: the "Trace Event Format" document of the Chromium project.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"

namespace tessera {

/// The rows, in the order in which they are shown.
enum class TraceRow : std::uint8_t {
  kSlots,        ///< slots of a pipeline's schedule
  kCompute,      ///< the step, forward and backward of each unit
  kWaits,        ///< the rank's thread waits for other ranks
  kTurns,        ///< the turns of a forward and a backward that overlap
  kActivations,  ///< activations between ranks of tp and ep, from issue to the end of the wait
  kMessages,     ///< between stages of a pipeline, from the sender's slot to their arrival
  kGathers,      ///< all-gathers under way
  kReductions,   ///< reduce-scatters under way
  kReplicas,     ///< sums over replicas under way
  kOptimizer,    ///< norm, clip and update
  kCount
};
std::string_view to_string(TraceRow row);

using TraceClock = std::chrono::steady_clock;

struct TraceSpan {
  using Argument = std::pair<std::string, std::variant<std::int64_t, double, std::string>>;

  TraceRow row = TraceRow::kCompute;
  std::string name;
  TraceClock::time_point begin;
  TraceClock::time_point end;
  std::vector<Argument> arguments = {};
};

/// Times on a device, which runs behind the host.
class DeviceMoments {
 public:
  virtual ~DeviceMoments() = default;
  /// Marks the end of all that the calling thread has launched so far. `host`: the key of that
  /// time.
  virtual void mark(TraceClock::time_point host) = 0;
  /// Returns the marked time of `host` once the device has reached it; `host` itself where none is
  /// marked.
  virtual TraceClock::time_point found(TraceClock::time_point host) const = 0;
};

/// Threads: any.
class Trace : public std::enable_shared_from_this<Trace> {
 public:
  /// Without a device, computations are done when their calls return.
  explicit Trace(std::unique_ptr<DeviceMoments> device = nullptr) : device_(std::move(device)) {}

  /// Returns the time for ends of spans. On a device the launched work ends at another time, by
  /// which take() replaces it, except in the rows of waits and messages, which are the host's.
  TraceClock::time_point now();
  void add(TraceSpan span);
  /// Returns the spans. The device must have finished all of them.
  std::vector<TraceSpan> take();

 private:
  base::Mutex mutex_;
  const std::unique_ptr<DeviceMoments> device_;
  std::vector<TraceSpan> spans_ TESSERA_GUARDED_BY(mutex_);
};

/// Returns the trace of this thread's rank; null: none is taken.
Trace* current_trace();

/// Makes `trace` the thread's current one while it lives.
class TraceHere {
 public:
  explicit TraceHere(std::shared_ptr<Trace> trace);
  ~TraceHere();
  TraceHere(const TraceHere&) = delete;
  TraceHere& operator=(const TraceHere&) = delete;

 private:
  std::shared_ptr<Trace> trace_;
  Trace* before_;
};

/// A span in the current trace, from its construction to its destruction. `name` must live as long.
class TraceScope {
 public:
  TraceScope(TraceRow row, std::string_view name) : trace_(current_trace()) {
    if (trace_ != nullptr) begin(row, name);
  }
  ~TraceScope() {
    if (trace_ != nullptr) end();
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  void begin(TraceRow row, std::string_view name);
  void end();

  Trace* trace_;
  TraceRow row_{};
  std::string_view name_;
  TraceClock::time_point begin_;
};

/// Returns spans of a row by their beginning, each outside of the next one or around it. A span
/// that overlaps with the next one without containing it is cut at the next one's beginning, and
/// gets the argument "uncut_ms": of several collectives under way the row shows the one that was
/// issued last.
std::vector<TraceSpan> nested(std::vector<TraceSpan> spans);

/// Returns the events of one rank, with commas between them, for chrome_trace().
std::string chrome_events(std::vector<TraceSpan> spans, int rank, TraceClock::time_point origin);

/// Returns the whole file of all ranks' events.
std::string chrome_trace(const std::vector<std::string>& events_by_rank);

}  // namespace tessera
