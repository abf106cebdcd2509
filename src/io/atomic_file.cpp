#include "io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

void check_io(bool done, std::string_view what, const std::filesystem::path& path) {
  const int error_number = errno;
  TESSERA_CHECK(done, ErrorKind::kIo, "cannot ", what, " ", shown(path), ": ",
                std::generic_category().message(error_number), " (errno ", error_number, ")");
}

}  // namespace

void sync_folder(const std::filesystem::path& folder) {
  const int descriptor =
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

int open_new_file(const std::filesystem::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return -1;
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), temporary_(path_) {
  // The rename at the end would put a file in the place of a device, as root even of /dev/null.
  std::error_code unknown;
  const auto there = std::filesystem::status(path_, unknown);
  TESSERA_CHECK(!std::filesystem::exists(there) || std::filesystem::is_regular_file(there),
                ErrorKind::kIo, shown(path_),
                ": found something that is no regular file, expected a file or nothing");
  temporary_ += "." + std::to_string(::getpid()) + ".tmp";
  descriptor_ = open_new_file(temporary_);
  check_io(descriptor_ >= 0, "create", temporary_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::resize(std::int64_t size_bytes) {
  check_io(::ftruncate(descriptor_, size_bytes) == 0, "set the size of", temporary_);
}

void AtomicFile::write(std::int64_t offset, std::span<const std::byte> bytes) {
  TESSERA_INVARIANT(descriptor_ >= 0, "write after commit to ", path_.native());
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data() + done, bytes.size() - done,
                                     offset + static_cast<std::int64_t>(done));
    if (written < 0 && errno == EINTR) continue;
    check_io(written >= 0, "write to", temporary_);
    done += static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  TESSERA_INVARIANT(descriptor_ >= 0, "second commit of ", path_.native());
  check_io(::fsync(descriptor_) == 0, "write out", temporary_);
  check_io(::rename(temporary_.c_str(), path_.c_str()) == 0, "rename the finished file to", path_);
  ::close(std::exchange(descriptor_, -1));
  sync_folder(path_.parent_path());
}

void write_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  AtomicFile file(path);
  file.write(0, bytes);
  file.commit();
}

void write_atomically(const std::filesystem::path& path, std::string_view text) {
  write_atomically(path, std::as_bytes(std::span(text)));
}

}  // namespace tessera
