#include "base/trace.h"

#include <gtest/gtest.h>

namespace tessera::trace_test {
namespace {

TraceClock::time_point at(int ms) { return TraceClock::time_point(std::chrono::milliseconds(ms)); }

TraceSpan span(const std::string& name, int begin, int end, TraceRow row = TraceRow::kGathers) {
  return {row, name, at(begin), at(end)};
}

std::string text(const std::vector<TraceSpan>& spans) {
  std::string result;
  for (const TraceSpan& one : spans) {
    const auto ms = [](TraceClock::time_point time) {
      return std::to_string(
          std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count());
    };
    result += one.name + " " + ms(one.begin) + "-" + ms(one.end) + "; ";
  }
  return result;
}

TEST(Trace, BelongsToTheThreadWhileItIsBound) {
  EXPECT_EQ(current_trace(), nullptr);
  {
    const TraceScope ignored(TraceRow::kWaits, "nobody looks");
  }
  const auto trace = std::make_shared<Trace>();
  {
    const TraceHere here(trace);
    EXPECT_EQ(current_trace(), trace.get());
    const TraceScope scope(TraceRow::kWaits, "a wait");
  }
  EXPECT_EQ(current_trace(), nullptr);
  const auto spans = trace->take();
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans[0].name, "a wait");
  EXPECT_EQ(spans[0].row, TraceRow::kWaits);
  EXPECT_LE(spans[0].begin, spans[0].end);
  EXPECT_TRUE(trace->take().empty());
}

TEST(NestedSpans, ApartAndInsideStayAsTheyAre) {
  EXPECT_EQ(text(nested({span("c", 60, 70), span("a", 0, 50), span("b", 10, 20), span("d", 70, 80),
                         span("inner", 0, 10)})),
            "a 0-50; inner 0-10; b 10-20; c 60-70; d 70-80; ");
}

TEST(NestedSpans, WhatReachesIntoTheNextIsCutThereAndSaysSo) {
  // Three collectives under way at once, waited for in order.
  const auto spans = nested({span("c", 20, 120), span("a", 0, 100), span("b", 10, 110)});
  EXPECT_EQ(text(spans), "a 0-10; b 10-20; c 20-120; ");
  ASSERT_EQ(spans[0].arguments.size(), 1U);
  EXPECT_EQ(spans[0].arguments[0].first, "uncut_ms");
  EXPECT_EQ(std::get<double>(spans[0].arguments[0].second), 100.0);
  EXPECT_TRUE(spans[2].arguments.empty());
}

TEST(NestedSpans, ACutReachesThroughAllThatHoldTheCutOne) {
  EXPECT_EQ(text(nested({span("outer", 0, 200), span("a", 10, 100), span("in a", 20, 90),
                         span("b", 50, 150)})),
            "outer 0-200; a 10-50; in a 20-50; b 50-150; ");
}

TEST(NestedSpans, RowsDoNotCutEachOther) {
  EXPECT_EQ(text(nested({span("g", 0, 20), span("w", 10, 30, TraceRow::kWaits), span("h", 5, 8)})),
            "w 10-30; g 0-20; h 5-8; ");
}

}  // namespace
}  // namespace tessera::trace_test
