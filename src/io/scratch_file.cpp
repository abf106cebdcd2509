#include "io/scratch_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

#include "base/test_hooks.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Of a system or file system that knows no O_TMPFILE.
bool has_no_nameless_files(int error_number) {
  return error_number == EOPNOTSUPP || error_number == EISDIR || error_number == EINVAL;
}

/// A descriptor, or -1 and errno.
int open_without_name(const std::filesystem::path& folder) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  const int descriptor = ::open(folder.c_str(), kFlags | O_TMPFILE, 0600);
  if (descriptor >= 0 || !has_no_nameless_files(errno)) return descriptor;
  std::string name = (folder / "tessera-offload-XXXXXX").native();
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0 && ::unlink(name.c_str()) != 0) {
    const int error_number = errno;
    ::close(named);
    errno = error_number;
    return -1;
  }
  return named;
}

}  // namespace

ScratchFile::ScratchFile(std::filesystem::path folder, std::string whose)
    : folder_(std::move(folder)), whose_(std::move(whose)) {
  std::error_code unknown;
  TESSERA_CHECK(std::filesystem::is_directory(folder_, unknown), ErrorKind::kIo, shown(folder_),
                ": found no folder, expected one for the optimizer state of ", whose_,
                "; make it, or name another");
  descriptor_ = open_without_name(folder_);
  if (descriptor_ < 0) fail("no file can be made in it", errno, "choose a folder to write to");
}

ScratchFile::~ScratchFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void ScratchFile::fail(const char* what, int error_number, const char* hint) const {
  throw Error(ErrorKind::kIo,
              concat(shown(folder_), ": optimizer state of ", whose_, ": ", what, " (",
                     std::generic_category().message(error_number), "); ", hint));
}

void ScratchFile::reserve(std::int64_t bytes) {
  if (bytes <= bytes_) return;
  int error_number = 0;
  do {
    error_number = ::posix_fallocate(descriptor_, bytes_, bytes - bytes_);
  } while (error_number == EINTR);
  if (error_number != 0) {
    // What of it was reserved goes back: others may need it.
    static_cast<void>(::ftruncate(descriptor_, bytes_));
    fail(concat("no room for ", bytes, " bytes").c_str(), error_number,
         "make room there, choose another folder, or offload less");
  }
  bytes_ = bytes;
}

void ScratchFile::require_inside(std::int64_t offset, std::size_t size) const {
  TESSERA_INVARIANT(offset >= 0 && std::cmp_less_equal(offset, bytes_) &&
                        std::cmp_less_equal(size, bytes_ - offset),
                    "bytes outside of a scratch file");
}

void ScratchFile::read(std::int64_t offset, std::span<std::byte> to) const {
  require_inside(offset, to.size());
  if (const auto hook = test_hooks::before_scratch_transfer.get()) (*hook)(whose_, offset, true);
  while (!to.empty()) {
    const ssize_t got = ::pread(descriptor_, to.data(), to.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("reading failed", errno, "is its disk in order?");
    if (got == 0) fail("reading failed: the file is shorter than it was", EIO, "who changed it?");
    to = to.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

void ScratchFile::write(std::int64_t offset, std::span<const std::byte> from) const {
  require_inside(offset, from.size());
  if (const auto hook = test_hooks::before_scratch_transfer.get()) (*hook)(whose_, offset, false);
  while (!from.empty()) {
    const ssize_t put = ::pwrite(descriptor_, from.data(), from.size(), offset);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("writing failed", errno, "is the disk full, or out of order?");
    from = from.subspan(static_cast<std::size_t>(put));
    offset += put;
  }
}

}  // namespace tessera
