#include "base/trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "tessera/error.h"

namespace tessera {
namespace {

thread_local constinit Trace* t_current = nullptr;

}  // namespace

std::string_view to_string(TraceRow row) {
  switch (row) {
    case TraceRow::kSlots:
      return "slots";
    case TraceRow::kCompute:
      return "compute";
    case TraceRow::kWaits:
      return "waits";
    case TraceRow::kTurns:
      return "turns";
    case TraceRow::kActivations:
      return "activations";
    case TraceRow::kMessages:
      return "messages";
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
  const base::Lock lock(mutex_);
  spans_.push_back(std::move(span));
}

TraceClock::time_point Trace::now() {
  const auto host = TraceClock::now();
  if (device_ != nullptr) {
    const base::Lock lock(mutex_);
    device_->mark(host);
  }
  return host;
}

std::vector<TraceSpan> Trace::take() {
  const base::Lock lock(mutex_);
  auto spans = std::exchange(spans_, {});
  if (device_ == nullptr) return spans;
  for (TraceSpan& span : spans) {
    if (span.row == TraceRow::kWaits || span.row == TraceRow::kMessages) continue;
    span.begin = device_->found(span.begin);
    span.end = std::max(span.begin, device_->found(span.end));
  }
  return spans;
}

Trace* current_trace() { return t_current; }

TraceHere::TraceHere(std::shared_ptr<Trace> trace) : trace_(std::move(trace)), before_(t_current) {
  t_current = trace_.get();
}

TraceHere::~TraceHere() { t_current = before_; }

void TraceScope::begin(TraceRow row, std::string_view name) {
  row_ = row;
  name_ = name;
  begin_ = trace_->now();
}

void TraceScope::end() { trace_->add({row_, std::string(name_), begin_, trace_->now()}); }

std::vector<TraceSpan> nested(std::vector<TraceSpan> spans) {
  std::sort(spans.begin(), spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    // Where several begin together, the outer one comes first.
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

namespace {

using OrderedJson = nlohmann::ordered_json;

double microseconds(TraceClock::duration time) {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()) /
         1000.0;
}

OrderedJson metadata(const char* what, int rank, int row, const OrderedJson& arguments) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", row}, {"args", arguments}};
}

OrderedJson trace_event(const TraceSpan& span, int rank, TraceClock::time_point origin) {
  OrderedJson arguments = OrderedJson::object();
  for (const auto& [name, value] : span.arguments) {
    std::visit([&, &n = name](const auto& v) { arguments[n] = v; }, value);
  }
  return {{"ph", "X"},
          {"name", span.name},
          {"cat", to_string(span.row)},
          {"pid", rank},
          {"tid", static_cast<int>(span.row)},
          {"ts", microseconds(span.begin - origin)},
          {"dur", microseconds(span.end - span.begin)},
          {"args", arguments}};
}

}  // namespace

std::string chrome_events(std::vector<TraceSpan> spans, int rank, TraceClock::time_point origin) {
  std::string text;
  const auto append = [&](const OrderedJson& json) {
    if (!text.empty()) text += ",\n";
    text += json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
  };
  append(metadata("process_name", rank, 0, {{"name", concat("rank ", rank)}}));
  append(metadata("process_sort_index", rank, 0, {{"sort_index", rank}}));
  std::set<TraceRow> named;
  for (const TraceSpan& span : nested(std::move(spans))) {
    if (named.insert(span.row).second) {
      const int row = static_cast<int>(span.row);
      append(metadata("thread_name", rank, row, {{"name", to_string(span.row)}}));
      append(metadata("thread_sort_index", rank, row, {{"sort_index", row}}));
    }
    append(trace_event(span, rank, origin));
  }
  return text;
}

std::string chrome_trace(const std::vector<std::string>& events_by_rank) {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n";
  for (std::size_t rank = 0; rank < events_by_rank.size(); ++rank) {
    text += concat(rank == 0 ? "" : ",\n", events_by_rank[rank]);
  }
  return text + "\n]}\n";
}

}  // namespace tessera
