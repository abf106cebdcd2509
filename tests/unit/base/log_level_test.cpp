// The lines of the log that reach stderr.
#include "tessera/log_level.h"

#include "base/log.h"
#include "base/trace.h"
#include "support/temporary_folder.h"

namespace tessera::log_level_test {
namespace {

/// Which of three lines, one of each level, stand in `text`.
std::vector<bool> lines_in(const std::string& text) {
  std::vector<bool> found;
  for (const char* word : {"an info", "a warning", "an error"}) {
    found.push_back(text.find(word) != std::string::npos);
  }
  return found;
}

std::vector<bool> lines_on_stderr() {
  ::testing::internal::CaptureStderr();
  log::info("an info");
  log::warn("a warning");
  log::error("an error");
  return lines_in(::testing::internal::GetCapturedStderr());
}

using Lines = std::vector<bool>;

// Property: the level that was set last, before or after the sinks were opened, holds on stderr, on
// ranks other than 0 for errors alone; a file has all lines.
TEST(LogLevel, NothingIsOnStderrUntilItIsAskedForAndThenThatLevel) {
  EXPECT_EQ(lines_on_stderr(), (Lines{false, false, false})) << "nothing was asked for";
  const TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    const auto file = folder / ("rank_" + std::to_string(rank));
    log::init({.rank = rank, .world_size = 2, .file = file});
    const bool first = rank == 0;
    set_log_level(LogLevel::kInfo);
    EXPECT_EQ(lines_on_stderr(), (Lines{first, first, true}));
    set_log_level(LogLevel::kWarn);
    EXPECT_EQ(lines_on_stderr(), (Lines{false, first, true}));
    log::init({.rank = rank, .world_size = 2, .file = file});
    EXPECT_EQ(lines_on_stderr(), (Lines{false, first, true}));
    set_log_level(LogLevel::kError);
    EXPECT_EQ(lines_on_stderr(), (Lines{false, false, true}));
    set_log_level(LogLevel::kNone);
    EXPECT_EQ(lines_on_stderr(), (Lines{false, false, false}));
    EXPECT_EQ(lines_in(read_file(file)), (Lines{true, true, true}));
  }
  log::init({});
}

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
    const TraceScope ignored(TraceRow::kWaits, "without a trace");
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
}  // namespace tessera::log_level_test
