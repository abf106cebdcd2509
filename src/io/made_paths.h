// MadePaths: what a run that may yet be refused makes on the way, so that it can be taken back.
//
// Nothing that somebody else made can be lost by it, also where the list of folders comes from
// another host, whose folders of the same names may be others: files are unlinked by the names that
// this process saw free, folders go by rmdir, which takes an empty one only. Nothing is removed with
// what it holds.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"

namespace tessera {

/// Absolute and without "." and "..", so that a path and those above it are what it is made of.
std::filesystem::path whole_path(const std::filesystem::path& path);

/// Threads: any.
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
