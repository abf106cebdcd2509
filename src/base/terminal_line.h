// One line at the bottom of a terminal that is written over again and again: progress.
//
// Nothing happens where stderr is no terminal. Whoever writes other lines clears it first (log
// lines do), so that the two never share a line. As stderr itself it belongs to the process.
#pragma once

#include <string>

namespace tessera::terminal_line {

/// Whether stderr is a terminal.
bool is_possible();

/// Shows `text`, cut to the width of the terminal, in place of what was shown. Threads: any.
void show(const std::string& text);

/// Removes it. Threads: any.
void clear();

/// Removes whatever stands there, also of another process of this run: before an error is printed.
void clear_of_any_process();

}  // namespace tessera::terminal_line
