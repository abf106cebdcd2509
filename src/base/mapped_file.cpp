#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string reason(int error_number) {
  return concat(std::generic_category().message(error_number), " (errno ", error_number, ")");
}

// A fault maps the cached pages of the whole aligned window around it (Linux, fault_around_bytes).
constexpr std::uintptr_t kFaultWindowBytes = std::uintptr_t{64} * 1024;

}  // namespace

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Without O_NONBLOCK opening a pipe would wait for a writer for ever.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TESSERA_CHECK(descriptor_ >= 0, ErrorKind::kIo, "cannot open ", shown(path_), ": ",
                reason(errno));
  struct stat status{};
  const int failed = ::fstat(descriptor_, &status);
  const int error_number = errno;
  const bool regular = failed == 0 && S_ISREG(status.st_mode);
  if (!regular) ::close(std::exchange(descriptor_, -1));
  TESSERA_CHECK(failed == 0, ErrorKind::kIo, "cannot stat ", shown(path_), ": ",
                reason(error_number));
  TESSERA_CHECK(regular, ErrorKind::kIo, "cannot read ", shown(path_),
                ": found a folder or a device, expected a regular file");
  size_bytes_ = status.st_size;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

void InputFile::read_range(std::int64_t offset, std::span<std::byte> out) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(descriptor_, out.data() + done, out.size() - done,
                                offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    TESSERA_CHECK(got >= 0, ErrorKind::kIo, "cannot read ", shown(path_), " at byte ", offset, ": ",
                  reason(errno));
    TESSERA_CHECK(got > 0, ErrorKind::kIo, "cannot read ", shown(path_), ": it ends after ",
                  offset + static_cast<std::int64_t>(done), " bytes, expected at least ",
                  offset + static_cast<std::int64_t>(out.size()));
    done += static_cast<std::size_t>(got);
  }
}

std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes) {
  const InputFile file(path);
  TESSERA_CHECK(file.size_bytes() <= max_bytes, ErrorKind::kFormat, shown(path), ": found ",
                file.size_bytes(), " bytes, expected at most ", max_bytes,
                " for a file of this kind");
  std::string text(static_cast<std::size_t>(file.size_bytes()), '\0');
  file.read_range(0, std::as_writable_bytes(std::span(text)));
  return text;
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const InputFile file(path);
  if (file.size_bytes() == 0) return;  // an empty mapping is refused by the system
  const auto length = static_cast<std::size_t>(file.size_bytes());
  void* const address = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  TESSERA_CHECK(address != MAP_FAILED, ErrorKind::kIo, "cannot map ", shown(path), " (", length,
                " bytes): ", reason(errno));
  bytes_ = {static_cast<const std::byte*>(address), length};
}

MappedFile::~MappedFile() { unmap(); }

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void MappedFile::unmap() noexcept {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

std::span<const std::byte> MappedFile::range(std::int64_t offset, std::int64_t length) const {
  TESSERA_CHECK(
      offset >= 0 && length >= 0 && offset <= size_bytes() && length <= size_bytes() - offset,
      ErrorKind::kFormat, shown(path_), ": bytes from ", offset, ", ", length,
      " of them, do not lie inside its ", size_bytes(), " bytes");
  return bytes_.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(length));
}

void MappedFile::advise(Access access) const {
  if (bytes_.empty()) return;
  int advice = MADV_NORMAL;
  if (access == Access::kSequential) advice = MADV_SEQUENTIAL;
  if (access == Access::kRandom) advice = MADV_RANDOM;
  ::madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(), advice);
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  TESSERA_INVARIANT(
      part.data() >= bytes_.data() && part.size() <= bytes_.size() &&
          part.data() - bytes_.data() <= static_cast<std::ptrdiff_t>(bytes_.size() - part.size()),
      "release of memory outside the mapping of ", path_.native());
  // Rounded outwards to what the faults mapped: a neighbour that still reads there only faults it
  // in once more.
  const auto mapping = reinterpret_cast<std::uintptr_t>(bytes_.data());
  const auto first = reinterpret_cast<std::uintptr_t>(part.data()) & ~(kFaultWindowBytes - 1);
  const auto last =
      (reinterpret_cast<std::uintptr_t>(part.data()) + part.size() + kFaultWindowBytes - 1) &
      ~(kFaultWindowBytes - 1);
  const std::size_t begin = std::max(first, mapping) - mapping;
  const std::size_t end = std::min<std::size_t>(last - mapping, bytes_.size());
  ::madvise(const_cast<std::byte*>(bytes_.data() + begin), end - begin, MADV_DONTNEED);
}

}  // namespace tessera
