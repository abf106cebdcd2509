#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/trace.h"

namespace tessera::chrome_trace_test {
namespace {

using nlohmann::json;
using std::chrono::nanoseconds;

TEST(ChromeTrace, IsOneProcessARankAndOneThreadARow) {
  const auto origin = TraceClock::time_point(nanoseconds(5'000'000));
  const TraceSpan gather{TraceRow::kGathers,
                         "layer \"0\"",
                         origin + nanoseconds(1500),
                         origin + nanoseconds(4000),
                         {{"sent_bytes", std::int64_t{4096}}, {"queued_ms", 0.5}, {"unit", "u"}}};
  const TraceSpan early{TraceRow::kCompute, "step 3", origin - nanoseconds(250), origin};
  const json trace = json::parse(
      chrome_trace({chrome_events({gather, early}, 0, origin), chrome_events({}, 1, origin)}));
  std::vector<json> spans;
  std::map<std::pair<int, int>, std::string> rows;
  std::map<int, std::string> processes;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "X") spans.push_back(event);
    if (event["name"] == "thread_name") {
      rows[{event["pid"], event["tid"]}] = event["args"]["name"];
    }
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}}));
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0]["name"], "step 3");
  EXPECT_EQ(spans[0]["ts"], -0.25) << "microseconds from the origin";
  EXPECT_EQ(spans[1]["ts"], 1.5);
  EXPECT_EQ(spans[1]["dur"], 2.5);
  EXPECT_EQ(spans[1]["name"], "layer \"0\"");
  EXPECT_EQ(spans[1]["args"],
            json::parse(R"({"sent_bytes": 4096, "queued_ms": 0.5, "unit": "u"})"));
  EXPECT_EQ((rows[{0, spans[0]["tid"]}]), "compute");
  EXPECT_EQ((rows[{0, spans[1]["tid"]}]), "gathers");
}

TEST(ChromeTrace, TextThatIsNotUtf8IsStillJson) {
  const auto now = TraceClock::now();
  const auto text =
      chrome_trace({chrome_events({{TraceRow::kWaits, "bad \xFF name", now, now}}, 0, now)});
  EXPECT_TRUE(json::accept(text));
}

}  // namespace
}  // namespace tessera::chrome_trace_test
