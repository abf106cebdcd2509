// A library for LD_PRELOAD: a disk that never answers.
//
//   TESSERA_TEST_STALLED_FILE=NAME
//
// fsync() of a file of this name does not return; its caller waits for ever. The program
// itself knows nothing of it. The file `stalled` in the working directory says that it has
// happened.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

namespace {

bool is_stalled(int descriptor) {
  const char* const name = std::getenv("TESSERA_TEST_STALLED_FILE");
  if (name == nullptr) return false;
  std::array<char, 4096> target{};
  const auto place = "/proc/self/fd/" + std::to_string(descriptor);
  const auto size = ::readlink(place.c_str(), target.data(), target.size());
  return size > 0 && std::string_view(target.data(), static_cast<std::size_t>(size))
                         .ends_with(std::string("/") + name);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int fsync(int descriptor) {
  using Sync = int (*)(int);
  static const auto real = reinterpret_cast<Sync>(::dlsym(RTLD_NEXT, "fsync"));
  if (!is_stalled(descriptor)) return real(descriptor);
  ::close(::open("stalled", O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  for (;;) ::pause();
}
