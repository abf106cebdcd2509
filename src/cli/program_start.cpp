#include "cli/program_start.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "tessera/error.h"

namespace tessera::cli {

void keep_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is this one. For reading only: writing to it is an error, as before.
    if (::open("/dev/null", O_RDONLY) != descriptor) return;
  }
}

void ignore_signals_of_writes() {
  for (const int number : {SIGXFSZ, SIGPIPE}) ::signal(number, SIG_IGN);
}

namespace {

void show_in_ps(const std::string& name) { ::prctl(PR_SET_NAME, name.c_str()); }

}  // namespace

void name_process() { show_in_ps("tessera"); }
void name_process_of_rank(int rank) { show_in_ps(concat("tessera:", rank)); }

}  // namespace tessera::cli
