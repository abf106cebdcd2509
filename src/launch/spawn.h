// Own spawn: one command starts all ranks of one host, and ends with the culprit's error as its
// last line.
//
// The parent starts this program again (fork and exec, before anything of libtorch ran), passes
// rank 0 a listening socket for the store, and waits. Children die with it. When one fails, the
// others have a few seconds to leave by themselves, then they are killed. No torch header. Next:
// failure_record.h says which rank is the culprit, failure_report.h how a child tells.
#pragma once

namespace tessera::comm {

/// Runs this program with its own arguments as `nproc` ranks and returns the exit code: 0, the
/// culprit's, or 128 + signal if it was killed. Passes SIGINT and SIGTERM on. OMP_NUM_THREADS
/// becomes cores / nproc unless it gives threads, and GOMP_SPINCOUNT short unless the user has said
/// how threads wait (rank_variables.h). Call from a process with one thread. Errors: kUsage for
/// nproc < 1; kIo when processes, pipes or sockets cannot be made.
int spawn_ranks(int nproc);

}  // namespace tessera::comm
