// Folders that other processes reach, too: finds files of a folder that another user made without
// being led out of it by a name or a link; allows one user of a folder at a time, while a process
// lives; and records what a run makes before it may be refused, so that it can be removed.
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

/// Returns FOLDER/NAME. Links are followed here, once. Errors: kIo where it cannot be reached;
/// kFormat where it is a link to a place outside of the folder (the blobs of a hub cache, where the
/// folder is one of its snapshots, count as inside).
std::filesystem::path file_inside(const std::filesystem::path& folder, const std::string& name);

/// The same; none where there is no such name. Errors: also kFormat for anything but a plain file.
std::optional<std::filesystem::path> optional_file_inside(const std::filesystem::path& folder,
                                                          const std::string& name);

/// A lock on a folder: two runs that write into one folder would spoil both without an error. The
/// lock is the system's (flock): it ends with its process in every case, so a crash leaves nothing
/// to clean up. The file itself stays, unless its holder unlinks it (a run that is refused does): a
/// process that waited at it then locks the new file. It guards only against accidents: a process
/// that does not ask for the lock is not stopped by it.
class FolderLock {
 public:
  /// Waits up to `patience` for its holder: a process that was killed may still be ending. `remedy`
  /// ends the message. Errors: kConfig where another process, or another lock of this one, holds
  /// it: names the folder and the holder; kIo.
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

/// Returns FOLDER/.lock; its text says which process took it last.
std::filesystem::path lock_file(const std::filesystem::path& folder);

/// Returns an absolute path without "." and "..", so that it consists of itself and the folders
/// above it.
std::filesystem::path whole_path(const std::filesystem::path& path);

/// The paths that a run has made, for removal. Nothing of another user can be lost by it, even
/// where the list of folders comes from another host, whose folders of the same names may be
/// different ones: files are unlinked by names that this process has seen free, and folders are
/// removed by rmdir, which takes only an empty one. Nothing is removed with its content. Threads:
/// any.
class MadePaths {
 public:
  /// Makes FOLDER and the missing folders above it. Errors: kIo naming the key.
  void make(const std::filesystem::path& folder, std::string_view key);
  /// Adds a folder that this process has just made.
  void add_folder(const std::filesystem::path& folder);
  /// Adds a file that this process is about to make, and the missing folders above it.
  void expect_file(const std::filesystem::path& file);
  /// Adds a lock file that this process made and holds. It is removed after all files, so that a
  /// process that finds it free finds no file that is about to be removed.
  void add_lock(const std::filesystem::path& file);
  /// Removes the files, then the folders that are empty by then, the inner ones first. Where
  /// several ranks have files in one folder, each calls it as it leaves; the last one finds the
  /// folder empty. Call it once: afterwards the names may be another run's.
  void remove() const;

  /// For the other ranks, which put files there, too.
  std::string folders() const;
  void take_folders(std::string_view folders);

 private:
  mutable base::Mutex mutex_;
  std::vector<std::filesystem::path> files_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::filesystem::path> locks_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::filesystem::path> folders_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
