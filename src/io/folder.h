// A folder that others reach too: files of one that somebody else made, found without being led out
// of it, by a name or by a link; one user of a folder at a time, for as long as a process lives; and
// what a run that may yet be refused makes on the way, so that it can be taken back.
#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace tessera {

/// Whether a name can only mean a file inside the folder that it is looked up in: no separator, not
/// "." or "..", no control byte, not longer than file systems allow.
bool is_plain_file_name(std::string_view name);

/// FOLDER/NAME. Links are followed here, once. Errors: kIo where it cannot be reached; kFormat
/// where it is a link to somewhere else than the folder (the blobs of a hub cache, where the folder
/// is one of its snapshots, are inside).
std::filesystem::path file_inside(const std::filesystem::path& folder, const std::string& name);

/// The same; none where there is no such name. Errors: also kFormat for anything but a plain file.
std::optional<std::filesystem::path> optional_file_inside(const std::filesystem::path& folder,
                                                          const std::string& name);

/// Two runs that write into one folder would spoil both without an error. The lock is the system's
/// (flock): it goes with its process however that ends, so nothing that a crash leaves has to be
/// cleaned up; the file itself stays, unless its holder unlinks it (a run that is refused does): who
/// waited at it then locks the one that stands there. Only a guard against accidents: who does not
/// ask for the lock is not held up by it.
class FolderLock {
 public:
  /// Waits up to `patience` for whoever holds it: a process that was killed may still be ending.
  /// `remedy` ends the message. Errors: kConfig where another process, or another lock of this one,
  /// holds it: names the folder and the holder; kIo.
  FolderLock(const std::filesystem::path& folder, std::chrono::milliseconds patience,
             const std::string& remedy);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

 private:
  int descriptor_ = -1;
};

/// FOLDER/.lock; its text says which process took it last.
std::filesystem::path lock_file(const std::filesystem::path& folder);

/// Absolute and without "." and "..", so that a path and those above it are what it is made of.
std::filesystem::path whole_path(const std::filesystem::path& path);

/// Nothing that somebody else made can be lost by it, also where the list of folders comes from
/// another host, whose folders of the same names may be others: files are unlinked by the names that
/// this process saw free, folders go by rmdir, which takes an empty one only. Nothing is removed
/// with what it holds. Threads: any.
class MadePaths {
 public:
  /// FOLDER and those above it that are not there. Errors: kIo naming the key.
  void make(const std::filesystem::path& folder, std::string_view key);
  /// A folder that this process has just made.
  void add_folder(const std::filesystem::path& folder);
  /// A file that this process is about to make, with the folders above it: noted where they are not
  /// there yet.
  void expect_file(const std::filesystem::path& file);
  /// A lock file that this process made and holds: goes after all files, so that whoever finds it
  /// free finds none of them going.
  void add_lock(const std::filesystem::path& file);
  /// The files, then the folders that are empty by then, the inner ones first. Of several ranks with
  /// files in one folder each does so as it leaves; the last one finds it empty. Call it once:
  /// afterwards the names may be another run's.
  void remove() const;

  /// For the other ranks, which put files there too.
  std::string folders() const;
  void take_folders(std::string_view folders);

 private:
  mutable base::Mutex mutex_;
  std::vector<std::filesystem::path> files_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::filesystem::path> locks_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::filesystem::path> folders_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
