#include "io/hashed_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Small enough that bytes are still in the cache when they are hashed, or written after it.
constexpr std::size_t kHashedChunkBytes = std::size_t{128} << 10;
// The disk begins to write while the rest still arrives.
constexpr std::int64_t kWriteOutBytes = std::int64_t{8} << 20;

class NewFile {
 public:
  explicit NewFile(const std::filesystem::path& path) : path_(path) {
    descriptor_ = open_new_file(path);
    check(descriptor_ >= 0, "create");
  }
  ~NewFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void append(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      check(written >= 0, "write to");
      bytes = bytes.subspan(static_cast<std::size_t>(written));
      size_ += written;
    }
    if (size_ - begun_ < kWriteOutBytes) return;
    // Only a hint: where it is refused fsync does all of the work.
    ::sync_file_range(descriptor_, begun_, size_ - begun_, SYNC_FILE_RANGE_WRITE);
    begun_ = size_;
  }
  void finish() { check(::fsync(descriptor_) == 0, "write out"); }

 private:
  void check(bool done, std::string_view what) const {
    const int error_number = errno;
    TESSERA_CHECK(done, ErrorKind::kIo, "cannot ", what, " ", shown(path_), ": ",
                  std::generic_category().message(error_number), " (errno ", error_number, ")");
  }

  const std::filesystem::path& path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
  std::int64_t begun_ = 0;  ///< the disk was asked to write up to here
};

}  // namespace

Hash128 write_hashed_file(const std::filesystem::path& path, std::span<const std::byte> bytes) {
  return write_hashed_parts(path, {bytes});
}

Hash128 write_hashed_parts(const std::filesystem::path& path,
                           const std::vector<std::span<const std::byte>>& parts) {
  NewFile file(path);
  Hash128Stream hash;
  for (auto bytes : parts) {
    while (!bytes.empty()) {
      const auto chunk = bytes.first(std::min(kHashedChunkBytes, bytes.size()));
      hash.add(chunk);
      file.append(chunk);
      bytes = bytes.subspan(chunk.size());
    }
  }
  file.finish();
  return hash.digest();
}

Hash128 read_hashed_file(const InputFile& file, std::vector<WantedBytes> wanted) {
  std::sort(wanted.begin(), wanted.end(),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  Hash128Stream hash;
  std::vector<std::byte> unwanted(kHashedChunkBytes);
  std::int64_t at = 0;
  const auto read = [&](std::span<std::byte> to) {
    file.read_range(at, to);
    hash.add(to);
    at += static_cast<std::int64_t>(to.size());
  };
  const auto skip_to = [&](std::int64_t offset) {
    TESSERA_CHECK(offset >= at && offset <= file.size_bytes(), ErrorKind::kUsage,
                  shown(file.path()), ": bytes from ", offset, " are wanted, found at ", at, " of ",
                  file.size_bytes());
    while (at < offset) {
      const auto left = static_cast<std::size_t>(offset - at);
      read(std::span(unwanted).first(std::min(unwanted.size(), left)));
    }
  };
  for (WantedBytes& one : wanted) {
    skip_to(one.offset);
    TESSERA_CHECK(static_cast<std::int64_t>(one.to.size()) <= file.size_bytes() - at,
                  ErrorKind::kUsage, shown(file.path()), ": ", one.to.size(), " bytes from ", at,
                  " are wanted, found ", file.size_bytes(), " in all");
    while (!one.to.empty()) {
      const auto chunk = one.to.first(std::min(kHashedChunkBytes, one.to.size()));
      read(chunk);
      one.to = one.to.subspan(chunk.size());
    }
  }
  skip_to(file.size_bytes());
  return hash.digest();
}

}  // namespace tessera
