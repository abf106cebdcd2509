// Log lines of the program: on stderr and in one file for each rank; and a line of progress at the
// bottom of a terminal.
//
// Every line goes to the rank's file once init() named one. stderr shows the lines that
// set_log_level() asks for (tessera/log_level.h), but on ranks other than 0 errors alone. Each line
// is written out at once: a failing rank leaves by _exit and flushes nothing. Metrics and results
// are not log lines (they go to stdout and metrics.jsonl). The formatting library stays inside
// log.cpp, whose target must not see libtorch's include folder.
//
// The line of progress is overwritten again and again. It is not shown where stderr is no terminal.
// Code that writes other lines clears it first (log lines do), so that the two never share a line.
// It belongs to the process, as stderr does.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/error.h"
#include "tessera/log_level.h"

namespace tessera::log {

using Level = LogLevel;

struct Options {
  int rank = 0;
  int world_size = 1;          ///< lines carry "[rank N]" where there is more than one
  std::filesystem::path file;  ///< e.g. RUN/logs/rank_0.log, appended to; empty = none
};

/// Opens the rank's file and creates its folder. Until then there is no file, and lines on stderr
/// name no rank. Errors: kIo where the file cannot be opened; the earlier sinks then stay. Threads:
/// any.
void init(const Options& options);

/// Writes one line. Threads: any.
void write(Level level, const std::string& message);

/// Writes one line to the file alone, if there is one: for text that reaches the screen in another
/// way. Threads: any.
void write_to_file(Level level, const std::string& message);

template <class... Parts>
void info(const Parts&... parts) {
  write(Level::kInfo, concat(parts...));
}

template <class... Parts>
void warn(const Parts&... parts) {
  write(Level::kWarn, concat(parts...));
}

template <class... Parts>
void error(const Parts&... parts) {
  write(Level::kError, concat(parts...));
}

}  // namespace tessera::log

namespace tessera::terminal_line {

/// Whether stderr is a terminal.
bool is_possible();

/// Replaces the line of progress by `text`, cut to the width of the terminal. Threads: any.
void show(const std::string& text);

/// Removes the line of progress. Threads: any.
void clear();

/// Removes the line, also that of another process of this run, before an error is printed.
void clear_of_any_process();

}  // namespace tessera::terminal_line
