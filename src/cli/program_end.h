// How the program ends. Pure.
//
// Exit codes: 0 done, 2 refused before the first step, 1 failed later, 3 a check that found
// problems; and how far a run has come, which they depend on.
//
// Whether the output of a verb arrives is checked: a full disk and a closed descriptor are errors.
// Next: program_start.h.
//
// SIGINT and SIGTERM while a rank trains: the first asks the run to end after its step, a second
// one ends this process at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/error.h"

namespace tessera::cli {

enum class Phase : std::uint8_t { kPreparing, kStepping };

/// Set by the trainer's callback, when everything was checked and the first step begins. Threads:
/// any.
class RunPhase {
 public:
  /// `prepared` is called as the first step begins: what it throws is still about the preparation.
  explicit RunPhase(std::function<void()> prepared = {}) : prepared_(std::move(prepared)) {}
  void begin_steps() {
    if (prepared_) prepared_();
    stepping_.store(true);
  }
  Phase now() const { return stepping_.load() ? Phase::kStepping : Phase::kPreparing; }

  /// `undo` takes back what was made for the run: called where it is refused, never once the steps
  /// have begun. Set before there is anything to take back.
  void when_refused(std::function<void()> undo) { undo_ = std::move(undo); }
  void refused() const {
    if (undo_ && now() == Phase::kPreparing) undo_();
  }

 private:
  const std::function<void()> prepared_;
  std::function<void()> undo_;
  std::atomic<bool> stepping_{false};
};

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kRefused = 2;
inline constexpr int kFoundProblems = 3;

/// The exit code of an error. Before the first step everything that a user gave (usage,
/// configuration, contract, files) is refused; a lost rank, a full disk or a bug is always a
/// failure, and FoundProblems is always kFoundProblems.
int exit_code(const std::exception& error, Phase phase);

/// Prints "tessera: <kind>: <message>" on stderr, in one line, and returns exit_code().
int report(const std::exception& error, Phase phase);

/// A failure (exit code 1) at any time: nothing that was asked for is wrong.
class OutputLost : public Error {
 public:
  using Error::Error;
};

/// Runs a verb whose output is its result, and returns its code. It ends as soon as a write to
/// std::cout fails: with kDone, and silently, where the reader has gone (`| head -1`). Errors:
/// OutputLost (kIo) where the output cannot be written for another reason; those of `verb`.
int run_for_output(const std::function<int()>& verb);

/// Prints what a verb has found and returns `code`, also where the reader has gone. Errors:
/// OutputLost as run_for_output.
int print_found(std::string_view text, int code);

/// Tries, before the work, whether `file` that a verb was asked for by `option` can be written, and
/// leaves nothing there. `input` is what the verb reads; "": nothing. Errors: kUsage where `file`
/// is `input`, kIo where it cannot be written.
void try_output(std::string_view option, const std::string& file, const std::string& input = "");

/// Writes a file that a verb was asked for by `option`, whole or not at all. Errors: OutputLost
/// where it cannot be written, which is no refusal: what it says was right.
void write_output(std::string_view option, const std::string& file, std::string_view text);

/// Writes out what std::cout holds, for a verb whose result is elsewhere. Errors: OutputLost (kIo)
/// where that, or anything before, could not be written, unless its reader has gone.
void check_standard_output();

/// Signals belong to the process, so this is one of the few things that do: make one, in a rank's
/// own process. The trainer only sees a function (TrainingHooks::stop_requested).
class StopSignal {
 public:
  /// Installs the handlers. They stay for the rest of the process: a first signal while a run that
  /// is saved takes its leave does not make it a failure. Errors: kIo.
  StopSignal();
  ~StopSignal() = default;
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// Whether one arrived.
  static bool requested();
};

}  // namespace tessera::cli
