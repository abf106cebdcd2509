#include "io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void check_io(bool done, std::string_view what, const std::filesystem::path& path) {
  const int error_number = errno;
  TESSERA_CHECK(done, ErrorKind::kIo, "cannot ", what, " ", shown(path), ": ",
                std::generic_category().message(error_number), " (errno ", error_number, ")");
}

/// Returns the path with links followed and no slash at the end: what a rename can replace.
fs::path final_path(const fs::path& path) {
  std::error_code failed;
  fs::path whole = fs::weakly_canonical(fs::absolute(path), failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot reach ", shown(path), ": ", failed.message());
  return whole.has_filename() ? whole : whole.parent_path();
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
  // The rename at the end would replace a device by a file: as root even /dev/null.
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

AtomicFolder::AtomicFolder(const fs::path& path) : path_(final_path(path)) {
  std::error_code failed;
  if (fs::exists(path_, failed)) {
    TESSERA_CHECK(
        fs::is_directory(path_, failed) && fs::is_empty(path_, failed) && !failed,
        ErrorKind::kUsage, shown(path_),
        ": found something there, expected no such folder or an empty one; choose another "
        "name or remove it");
  }
  temporary_ = path_;
  temporary_ += "." + std::to_string(::getpid()) + ".tmp";
  const auto check_made = [&] {
    TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot make ", shown(temporary_), ": ",
                  failed.message());
  };
  fs::remove_all(temporary_, failed);  // left by a process of the same number
  fs::create_directories(temporary_.parent_path(), failed);
  check_made();
  // The folder must be new: one that another program made meanwhile, or a link to one, is not used.
  const bool is_new = fs::create_directory(temporary_, failed);
  check_made();
  TESSERA_CHECK(is_new, ErrorKind::kIo, "cannot make ", shown(temporary_),
                ": found one that another program just made, expected none");
}

AtomicFolder::~AtomicFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

void AtomicFolder::commit() {
  TESSERA_INVARIANT(!temporary_.empty(), "second commit of ", path_.native());
  sync_folder(temporary_);
  std::error_code failed;
  fs::rename(temporary_, path_, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot rename the finished folder to ", shown(path_),
                ": ", failed.message());
  temporary_.clear();
  sync_folder(path_.parent_path());
}

}  // namespace tessera
