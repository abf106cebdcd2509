// ChildEnds: the exit codes of this process's children, also where the process was started with
// SIGCHLD ignored: the system then keeps none, and waitpid() fails with ECHILD.
#pragma once

#include <signal.h>

namespace tessera::comm {

/// Makes the system keep exit codes while it lives. For a process with one thread.
class ChildEnds {
 public:
  ChildEnds() {
    ::sigaction(SIGCHLD, nullptr, &before_);
    if (before_.sa_handler == SIG_IGN || (before_.sa_flags & SA_NOCLDWAIT) != 0) {
      ::signal(SIGCHLD, SIG_DFL);
    }
  }
  ~ChildEnds() { ::sigaction(SIGCHLD, &before_, nullptr); }
  ChildEnds(const ChildEnds&) = delete;
  ChildEnds& operator=(const ChildEnds&) = delete;

 private:
  struct sigaction before_{};
};

}  // namespace tessera::comm
