// Exit codes of the program: 0 done, 2 refused before the first step, 1 failed later, 3 a check
// that found problems; and how far a run has come, which they depend on. Pure.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <utility>

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

 private:
  const std::function<void()> prepared_;
  std::atomic<bool> stepping_{false};
};

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kRefused = 2;
inline constexpr int kFoundProblems = 3;

/// What an error means for the exit code. Before the first step everything that a user gave (usage,
/// configuration, contract, files) is refused; a lost rank, a full disk or a bug is a failure
/// always, and FoundProblems always kFoundProblems.
int exit_code(const std::exception& error, Phase phase);

/// Prints "tessera: <kind>: <message>" on stderr, in one line, and returns exit_code().
int report(const std::exception& error, Phase phase);

}  // namespace tessera::cli
