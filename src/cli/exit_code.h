// Exit codes of the program: 0 done, 2 refused before the first step, 1 failed later, 3 a check
// that found problems. Pure.
#pragma once

#include <exception>

#include "cli/run_phase.h"

namespace tessera::cli {

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
