// A library for LD_PRELOAD: a disk that breaks while a run goes on.
//
//   TESSERA_TEST_READS_BEFORE_FAILURE=N
//
// pread() of a file without a name fails from the Nth time on (EIO), in each process by itself. The
// program itself knows nothing of it.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <string_view>

namespace {

bool has_no_name(int descriptor) {
  std::array<char, 4096> target{};
  const auto place = "/proc/self/fd/" + std::to_string(descriptor);
  const auto size = ::readlink(place.c_str(), target.data(), target.size());
  return size > 0 &&
         std::string_view(target.data(), static_cast<std::size_t>(size)).ends_with(" (deleted)");
}

bool fails_now(int descriptor) {
  static std::atomic<long> reads{0};
  const char* const before = std::getenv("TESSERA_TEST_READS_BEFORE_FAILURE");
  return before != nullptr && has_no_name(descriptor) && ++reads >= std::atol(before);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ssize_t pread(int descriptor, void* to,
                                                                std::size_t size, off_t offset) {
  using Read = ssize_t (*)(int, void*, std::size_t, off_t);
  static const auto real = reinterpret_cast<Read>(::dlsym(RTLD_NEXT, "pread"));
  if (!fails_now(descriptor)) return real(descriptor, to, size, offset);
  errno = EIO;
  return -1;
}
