// AtomicFile, AtomicFolder: a file or a folder that appears under its name complete, or not at all.
//
// Bytes go to a temporary name in the same folder; commit() makes them durable and renames. A
// reader that finds the final name may trust its content, also after a crash or a full disk. Files
// that are written into an AtomicFolder must be made durable by their writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace tessera {

/// Makes the names in a folder durable: after a rename, or for new files. Some network file systems
/// refuse; then nothing can be promised.
void sync_folder(const std::filesystem::path& folder);

/// Opens `path` for writing as a new file: what a crashed run left under the name is removed first,
/// and a link that another user placed there leads no bytes elsewhere. Returns -1 with errno where
/// that cannot be done.
int open_new_file(const std::filesystem::path& path);

/// Writes a file with this content, completely or not at all. Errors: kIo.
void write_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes);
void write_atomically(const std::filesystem::path& path, std::string_view text);

class AtomicFile {
 public:
  /// Makes "PATH.<pid>.tmp" (one that an earlier process of this number left is removed). Errors:
  /// kIo.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();  ///< removes the temporary file where commit() was not reached
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Sets the length; what is not written reads as zero. Errors: kIo.
  void resize(std::int64_t size_bytes);

  /// Errors: kIo (disk full, ...). Threads: any, on ranges that do not overlap.
  void write(std::int64_t offset, std::span<const std::byte> bytes);

  /// fsync, rename, fsync of the folder. Nothing may be written afterwards. Errors: kIo.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

/// A folder whose files are written into a temporary folder next to the final one; commit() renames
/// it.
class AtomicFolder {
 public:
  /// Makes "PATH.<pid>.tmp" and the folders above it. Errors: kUsage where `path` exists and is not
  /// an empty folder; kIo.
  explicit AtomicFolder(const std::filesystem::path& path);
  ~AtomicFolder();  ///< removes the temporary folder where commit() was not reached
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }            ///< the final one
  const std::filesystem::path& temporary() const { return temporary_; }  ///< write here

  /// Errors: kIo, also where the final name has been taken meanwhile.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;  // empty once committed
};

}  // namespace tessera
