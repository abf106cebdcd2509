// Files that are read in place: a read-only mapping of a whole file, and positioned reads.
//
// Model and data files are larger than a rank's share of memory, so that no file is loaded whole: a
// rank maps it, accesses the ranges that it owns and returns their pages to the system. Pages of a
// mapping count as resident until then, which is why release() exists. A file that is cut short
// while it is mapped raises SIGBUS, as with any mapping; sizes are checked once, when it is opened.
// A program can make that end with a message (report_cut_files). Next: io/safetensors.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace tessera {

enum class Access { kNormal, kSequential, kRandom };

/// A regular file open for reading. Errors: kIo with path and reason (missing, a folder, a pipe).
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;

  const std::filesystem::path& path() const { return path_; }
  std::int64_t size_bytes() const { return size_bytes_; }
  int descriptor() const { return descriptor_; }

  /// Fills `out` from `offset`. Errors: kIo where the file ends before.
  void read_range(std::int64_t offset, std::span<std::byte> out) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_bytes_ = 0;
};

/// Returns the whole of a small text file. Errors: kIo; kFormat where it is larger than
/// `max_bytes`.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes);

class MappedFile {
 public:
  MappedFile() = default;  ///< maps nothing
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const { return bytes_; }
  std::int64_t size_bytes() const { return static_cast<std::int64_t>(bytes_.size()); }

  /// Returns a view of `length` bytes from `offset`. Errors: kFormat where they are not inside the
  /// file.
  std::span<const std::byte> range(std::int64_t offset, std::int64_t length) const;

  /// Tells the system how the mapping will be read, as a hint.
  void advise(Access access) const;

  /// Returns the pages of `part` (a part of bytes()) to the system. A later read faults them in
  /// again. Threads: any.
  void release(std::span<const std::byte> part) const;

 private:
  void unmap() noexcept;

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
  std::size_t watched_ = 0;  // index for the handler of SIGBUS
};

/// Where the message goes, in addition to stderr or instead of it.
struct CutFileReport {
  int descriptor = -1;  ///< < 0: stderr alone; else stderr only where it cannot be written
  std::string head;     ///< written there before the message
};

/// From now on SIGBUS in a mapping of a MappedFile ends this process with exit code 1 and a line
/// that names the file; elsewhere it does what it did before. It is for programs, not for the
/// library, since signals belong to the process. Threads: one, before other threads read; a second
/// call changes the report. Errors: kIo.
void report_cut_files(const CutFileReport& report = {});

}  // namespace tessera
