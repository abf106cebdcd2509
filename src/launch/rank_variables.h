// The variables that libgomp reads when it is loaded: the code that executes a process or opens
// libtorch has to set them before.
//
// Threads of libgomp spin while they wait for each other, by default for some 10 ms. Under other
// load the thread that they wait for gets no core meanwhile, and a step takes 20 to 70 times as
// long. A short spin still bridges the gaps between loops, and frees the core in longer waits.
// Pure. Next: spawn.h sets them for ranks.
#pragma once

#include <string_view>

#include "base/environment.h"

namespace tessera::comm {

/// NAME=VALUE, from measurements: with fewer turns a step of a small model with its cores to itself
/// is slower, with more a step under other load is (docs/launchers.md).
inline constexpr char kShortSpins[] = "GOMP_SPINCOUNT=3000";

/// Whether `entry`, NAME=VALUE, says how threads wait: it is GOMP_SPINCOUNT or OMP_WAIT_POLICY, set
/// to more than blanks.
constexpr bool says_how_threads_wait(std::string_view entry) {
  for (const std::string_view name : {"GOMP_SPINCOUNT=", "OMP_WAIT_POLICY="}) {
    if (entry.starts_with(name)) {
      return entry.find_first_not_of(" \t\n\v\f\r", name.size()) != std::string_view::npos;
    }
  }
  return false;
}

/// Short spins, unless the user has said how threads wait.
void set_spin_variable(base::Environment& variables);

/// The variables of a rank with `threads` threads: OMP_NUM_THREADS, unless it is set to a number,
/// and short spins.
void set_thread_variables(base::Environment& variables, int threads);

}  // namespace tessera::comm
