// SIGINT and SIGTERM while a rank trains: the first asks the run to end after its step, a second
// one ends this process at once.
//
// Signals belong to the process, so this is one of the few things that do: make one, in a rank's
// own process. The trainer only sees a function (TrainingHooks::stop_requested).
#pragma once

namespace tessera::cli {

class StopSignal {
 public:
  /// Installs the handlers; also makes writing past a file size limit an error of the write
  /// (EFBIG, with a message) instead of a signal. The handlers stay for the rest of the process: a
  /// first signal while a run that is saved takes its leave does not make it a failure. Errors:
  /// kIo.
  StopSignal();
  ~StopSignal() = default;
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Whether one arrived.
  static bool requested();
};

}  // namespace tessera::cli
