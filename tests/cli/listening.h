// Who listens where, as the kernel's tables say.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::cli {

/// Local addresses ("127.0.0.1") of the TCP sockets on which a process listens, in its own network;
/// without those that its launcher has left open in it.
std::vector<std::string> listening_addresses(pid_t pid);

}  // namespace tessera::cli
