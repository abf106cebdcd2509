// The lines of the log that reach stderr.
#include "tessera/log_level.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/log.h"
#include "unit/io/temporary_folder.h"

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
  const testing::TemporaryFolder folder;
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
    std::ifstream stream(file);
    const std::string text((std::istreambuf_iterator<char>(stream)), {});
    EXPECT_EQ(lines_in(text), (Lines{true, true, true}));
  }
  log::init({});
}

}  // namespace
}  // namespace tessera::log_level_test
