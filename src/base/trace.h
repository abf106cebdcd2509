// Trace: what one rank did in one step, as spans of time in rows; and such traces as a file. Pure.
//
// Nearly always there is none: whoever could add a span asks current_trace() and does nothing else.
// A trace is made for single steps (train/report/observers.h). It belongs to a thread, as a rank
// does: forward, backward, waits and updates run on the rank's own thread, and a collective takes
// the trace along to the issuing thread (comm/queue.h).
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

/// In the order in which they are shown.
enum class TraceRow : std::uint8_t {
  kSlots,        ///< of a pipeline's schedule
  kCompute,      ///< the step, forward and backward of each unit
  kWaits,        ///< the rank's own thread waits for others
  kTurns,        ///< the pieces of a forward and a backward that run under each other
  kActivations,  ///< activations between ranks of tp and ep, from their issue to the end of the wait
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

/// Moments of a device, which the host goes ahead of.
class DeviceMoments {
 public:
  virtual ~DeviceMoments() = default;
  /// When it is through with what the calling thread has launched so far; `host` stands for it.
  virtual void mark(TraceClock::time_point host) = 0;
  /// Once it is through: the moment that `host` stands for; itself, where it stands for none.
  virtual TraceClock::time_point found(TraceClock::time_point host) const = 0;
};

/// Threads: any.
class Trace : public std::enable_shared_from_this<Trace> {
 public:
  /// Null: what computes is done when its call returns.
  explicit Trace(std::unique_ptr<DeviceMoments> device = nullptr) : device_(std::move(device)) {}

  /// For ends of spans. On a device what was launched so far is done at another time, which take()
  /// puts in its place; not in the rows of waits and messages, which are the host's.
  TraceClock::time_point now();
  void add(TraceSpan span);
  /// The device has to be through with all of them.
  std::vector<TraceSpan> take();

 private:
  base::Mutex mutex_;
  const std::unique_ptr<DeviceMoments> device_;
  std::vector<TraceSpan> spans_ TESSERA_GUARDED_BY(mutex_);
};

/// Of the rank whose thread this is; null: nobody looks.
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

/// A span from its construction to its end, in the current trace. `name` must live as long.
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

/// Spans of a row in order of their beginning, each apart from the next or around it. What reaches
/// into the next one without holding it is cut where that begins, and gets the argument "uncut_ms":
/// of several collectives under way the row shows the one that was issued last.
std::vector<TraceSpan> nested(std::vector<TraceSpan> spans);

/// The events of one rank, with commas between; what chrome_trace() puts together.
std::string chrome_events(std::vector<TraceSpan> spans, int rank, TraceClock::time_point origin);

/// The whole file of all ranks' events.
std::string chrome_trace(const std::vector<std::string>& events_by_rank);

}  // namespace tessera
