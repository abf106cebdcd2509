#include "io/chrome_trace.h"

#include <nlohmann/json.hpp>
#include <set>

#include "tessera/error.h"

namespace tessera {
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
