// set_log_level(): the messages that the library prints on stderr, by default none.
//
// These messages are facts that no call returns, such as that a checkpoint is complete or why a
// unit stays eager. Errors are exceptions, and a process that ends because of another rank prints
// the reason in any case (world.h). Next: error.h.
#pragma once

namespace tessera {

/// The least level of a printed message.
enum class LogLevel {
  kInfo,   ///< every line
  kWarn,   ///< warnings and errors
  kError,  ///< errors that no call returns
  kNone,   ///< no line
};

/// Sets the level from which messages are printed on stderr, for the whole process. The default is
/// kNone. Threads: any.
void set_log_level(LogLevel level);

}  // namespace tessera
