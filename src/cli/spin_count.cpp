// Executes this program once more, as the same process, with GOMP_SPINCOUNT, unless the environment
// says how libgomp's threads wait (launch/rank_variables.h).
//
// libgomp reads its variables in its constructor, so main() is too late to set them. This runs
// before the constructors of all libraries (.preinit_array), of which libtorch's take most of a
// start: the second execution costs 30 ms. It uses the kernel's arguments and system calls alone,
// since nothing else is ready. Where it does not run, or the execution fails, the program is slower
// but not wrong. It runs only once: the second execution has the variable.
#include <alloca.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cstddef>
#include <string_view>

#include "launch/rank_variables.h"

namespace tessera::cli {
namespace {

// Runtimes of sanitizers are not ready either, and the speed of such a build does not matter.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

void execute_with_short_spins(int /*arguments*/, char** arguments, char** variables) {
  std::size_t count = 0;
  for (; variables[count] != nullptr; ++count) {
    if (comm::says_how_threads_wait(std::string_view(variables[count]))) return;
  }
  // Without an interpreter it is the loader that was executed (ld.so tessera ...), and
  // /proc/self/exe is that.
  if (::getauxval(AT_BASE) == 0) return;
  auto** const with = static_cast<char**>(::alloca((count + 2) * sizeof(char*)));
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool blank = std::string_view(variables[i]).starts_with("GOMP_SPINCOUNT=");
    if (!blank) with[kept++] = variables[i];
  }
  with[kept++] = const_cast<char*>(comm::kShortSpins);
  with[kept] = nullptr;
  ::execve("/proc/self/exe", arguments, with);
}

[[gnu::used, gnu::section(".preinit_array")]] void (*const before_libraries)(int, char**, char**) =
    execute_with_short_spins;

#endif

}  // namespace
}  // namespace tessera::cli
