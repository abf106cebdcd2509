// A library for LD_PRELOAD: in one rank, one allocation of a tensor fails, at a given time.
//
//   TESSERA_TEST_FAIL_RANK=R TESSERA_TEST_FAIL_AFTER_MS=T
//
// libtorch then throws from wherever the program is: reading weights, in forward, in backward, in
// the optimizer, on the thread that issues collectives. The program itself knows nothing of it.
// Only the first tensor after T milliseconds is concerned, so an error that is swallowed shows as a
// run that continues. The file `failed` in the working directory says that it has happened.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> armed{false};
Clock::time_point fails_at;

__attribute__((constructor)) void arm() {
  const char* const victim = std::getenv("TESSERA_TEST_FAIL_RANK");
  const char* const after = std::getenv("TESSERA_TEST_FAIL_AFTER_MS");
  const char* const rank = std::getenv("TESSERA_SPAWN_RANK");
  if (victim == nullptr || after == nullptr || rank == nullptr) return;
  if (std::strcmp(victim, rank) != 0) return;
  fails_at = Clock::now() + std::chrono::milliseconds(std::atoi(after));
  armed = true;
}

/// Tensors come from libc10; what other libraries need for themselves is left alone.
bool is_for_a_tensor(const void* caller) {
  Dl_info info{};
  return ::dladdr(caller, &info) != 0 && std::strstr(info.dli_fname, "libc10.so") != nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int posix_memalign(void** memory,
                                                                     std::size_t alignment,
                                                                     std::size_t bytes) noexcept {
  using Function = int (*)(void**, std::size_t, std::size_t);
  static const auto real = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "posix_memalign"));
  if (armed && Clock::now() >= fails_at && is_for_a_tensor(__builtin_return_address(0)) &&
      armed.exchange(false)) {
    ::close(::open("failed", O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    return ENOMEM;
  }
  return real(memory, alignment, bytes);
}
