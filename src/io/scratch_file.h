// A file without a name: bytes of one process that lie on a disk and not in memory.
//
// Nobody else sees it, and nothing of it is left once the process has ended, however that came
// about: it is made without a name (O_TMPFILE), or loses its name at once where the file system
// cannot do that. Room is reserved before anything is written, so that a full disk is found then.
// It is read and written by calls, not mapped: pages of a mapping count as the process's memory.
// Pure. Next: fsdp/optim/state_tier.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace tessera {

class ScratchFile {
 public:
  /// Empty, in `folder`; `whose`, as "rank 1", is named by errors. Errors: kIo where the folder is
  /// none, or cannot be written to.
  ScratchFile(std::filesystem::path folder, std::string whose);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  const std::filesystem::path& folder() const { return folder_; }
  std::int64_t bytes() const { return bytes_; }  ///< that are reserved
  /// Makes it at least this long, zeros where nothing was written. Errors: kIo where the disk has
  /// no room: it is as it was then.
  void reserve(std::int64_t bytes);
  /// All of `to`, or an error. Within what is reserved. Errors: kIo. Threads: any.
  void read(std::int64_t offset, std::span<std::byte> to) const;
  void write(std::int64_t offset, std::span<const std::byte> from) const;

 private:
  [[noreturn]] void fail(const char* what, int error_number, const char* hint) const;
  void require_inside(std::int64_t offset, std::size_t size) const;

  const std::filesystem::path folder_;
  const std::string whose_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
};

}  // namespace tessera
