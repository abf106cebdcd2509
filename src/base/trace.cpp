#include "base/trace.h"

#include <algorithm>
#include <tuple>

namespace tessera {
namespace {

thread_local constinit Trace* t_current = nullptr;

}  // namespace

std::string_view to_string(TraceRow row) {
  switch (row) {
    case TraceRow::kCompute:
      return "compute";
    case TraceRow::kWaits:
      return "waits";
    case TraceRow::kActivations:
      return "activations";
    case TraceRow::kGathers:
      return "gathers";
    case TraceRow::kReductions:
      return "reductions";
    case TraceRow::kReplicas:
      return "sums over replicas";
    case TraceRow::kOptimizer:
      return "optimizer";
    case TraceRow::kCount:
      break;
  }
  return "unknown";
}

void Trace::add(TraceSpan span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<TraceSpan> Trace::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(spans_, {});
}

Trace* current_trace() { return t_current; }

TraceHere::TraceHere(std::shared_ptr<Trace> trace) : trace_(std::move(trace)), before_(t_current) {
  t_current = trace_.get();
}

TraceHere::~TraceHere() { t_current = before_; }

void TraceScope::begin(TraceRow row, std::string_view name) {
  row_ = row;
  name_ = name;
  begin_ = TraceClock::now();
}

void TraceScope::end() { trace_->add({row_, std::string(name_), begin_, TraceClock::now()}); }

std::vector<TraceSpan> nested(std::vector<TraceSpan> spans) {
  std::sort(spans.begin(), spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    // Of those that begin together the outer one comes first.
    return std::tie(a.row, a.begin, b.end, a.name) < std::tie(b.row, b.begin, a.end, b.name);
  });
  std::vector<TraceSpan*> open;
  for (TraceSpan& span : spans) {
    if (!open.empty() && open.front()->row != span.row) open.clear();
    while (!open.empty()) {
      TraceSpan& before = *open.back();
      if (span.begin < before.end && span.end <= before.end) break;  // inside
      if (span.begin < before.end) {
        const std::chrono::duration<double, std::milli> uncut = before.end - before.begin;
        before.arguments.emplace_back("uncut_ms", uncut.count());
        before.end = span.begin;
      }
      open.pop_back();
    }
    open.push_back(&span);
  }
  return spans;
}

}  // namespace tessera
