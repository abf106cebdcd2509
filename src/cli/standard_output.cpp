#include "cli/standard_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>

namespace tessera::cli {

void check_standard_output() {
  errno = 0;
  std::cout.flush();
  if (std::cout.good()) return;
  throw OutputLost(ErrorKind::kIo,
                   concat("stdout: found that it cannot be written", errno == 0 ? "" : ": ",
                          errno == 0 ? "" : std::strerror(errno),
                          ", expected an open file with space; what was printed is not complete"));
}

void keep_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is this one. For reading only: writing to it is an error, as before.
    if (::open("/dev/null", O_RDONLY) != descriptor) return;
  }
}

}  // namespace tessera::cli
