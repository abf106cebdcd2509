#include "base/appended_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

namespace fs = std::filesystem;

void require_no_link(const fs::path& path) {
  std::error_code unknown;
  const auto there = fs::symlink_status(path, unknown);
  TESSERA_CHECK(!fs::is_symlink(there), ErrorKind::kIo, shown(path),
                ": found a symbolic link, expected a regular file or nothing; remove it, or make "
                "its folder the link");
  TESSERA_CHECK(!fs::exists(there) || fs::is_regular_file(there), ErrorKind::kIo, shown(path),
                ": found something that is no regular file, expected a regular file or nothing; "
                "remove it, or choose another folder");
}

std::string read_no_link(const fs::path& path) {
  require_no_link(path);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  int error_number = errno;
  if (descriptor < 0 && error_number == ENOENT) return {};
  const auto require = [&](bool worked) {
    if (worked) return;
    if (descriptor >= 0) ::close(descriptor);
    throw Error(ErrorKind::kIo, concat(shown(path), ": cannot be read as a file (",
                                       std::generic_category().message(error_number), ")"));
  };
  require(descriptor >= 0);
  struct stat status{};
  error_number = EINVAL;
  require(::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode));
  std::string bytes;
  std::array<char, 65536> piece{};
  for (;;) {
    const ssize_t got = ::read(descriptor, piece.data(), piece.size());
    error_number = errno;
    if (got < 0 && error_number == EINTR) continue;
    require(got >= 0);
    if (got == 0) break;
    bytes.append(piece.data(), static_cast<std::size_t>(got));
  }
  ::close(descriptor);
  return bytes;
}

AppendedFile::AppendedFile(fs::path path, From from) : path_(std::move(path)) {
  require_no_link(path_);
  // Truncated only once it is known to be a file. O_NOFOLLOW refuses a link that was placed
  // meanwhile, and O_NONBLOCK keeps a pipe without a reader from blocking.
  int flags = O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  if (from == From::kNothing) flags |= O_EXCL;
  descriptor_ = ::open(path_.c_str(), flags, 0666);
  const int error_number = errno;
  TESSERA_CHECK(descriptor_ >= 0, ErrorKind::kIo, shown(path_), ": cannot be opened for writing (",
                std::generic_category().message(error_number), ")");
  struct stat status{};
  const bool is_file = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!is_file || (from == From::kEmpty && ::ftruncate(descriptor_, 0) != 0)) {
    ::close(std::exchange(descriptor_, -1));
    throw Error(ErrorKind::kIo, concat(shown(path_), ": cannot be opened for writing as a file"));
  }
}

AppendedFile::~AppendedFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void AppendedFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    const int error_number = errno;
    TESSERA_CHECK(written >= 0, ErrorKind::kIo, shown(path_), ": writing failed (",
                  std::generic_category().message(error_number), "); is the disk full?");
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace tessera
