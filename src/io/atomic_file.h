// A file, or a folder, that appears under its name complete, or not at all.
//
// Bytes go to a temporary name in the same folder; commit() makes them durable and renames. Whoever
// finds the final name may trust its content, also after a crash or a full disk. What is written in
// a folder makes itself durable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace tessera {

/// A name in a folder is durable once the folder is: after a rename, or for files just made. Some
/// network file systems refuse; then it is not ours to promise.
void sync_folder(const std::filesystem::path& folder);

/// Opens `path` for writing as a file that was not there: what a crashed run left under the name is
/// removed first, and no link that somebody placed there leads the bytes away. Returns -1 with
/// errno where that cannot be done.
int open_new_file(const std::filesystem::path& path);

/// A file of this content, whole or not at all. Errors: kIo.
void write_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes);
void write_atomically(const std::filesystem::path& path, std::string_view text);

class AtomicFile {
 public:
  /// Makes "PATH.<pid>.tmp" (one that a process of our number left is removed). Errors: kIo.
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

/// Files are written into a temporary folder beside the final one; commit() renames it.
class AtomicFolder {
 public:
  /// Makes "PATH.<pid>.tmp" and the folders above it. Errors: kUsage where `path` is there and is
  /// no empty folder; kIo.
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
