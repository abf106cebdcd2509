// The library says nothing on stderr while it works, until a program asks for it.
//
// This is about messages that no call returns, such as that a checkpoint is complete or why a unit
// stays eager. Errors are exceptions, and a process that ends because of another rank prints the
// reason in any case (world.h). Next: error.h.
#pragma once

namespace tessera {

enum class LogLevel {
  kInfo,   ///< every line
  kWarn,   ///< warnings and errors
  kError,  ///< errors that no call returns
  kNone,   ///< no line
};

/// Prints lines of `level` and above on stderr from now on, in the whole process; kNone until this
/// is called. Threads: any.
void set_log_level(LogLevel level);

}  // namespace tessera
