// One user of a folder at a time, for as long as a process lives.
//
// Two runs that write into one folder would spoil both without an error. The lock is the system's
// (flock): it goes with its process however that ends, so nothing that a crash leaves has to be
// cleaned up; the file itself stays. Only a guard against accidents: who does not ask for the lock
// is not held up by it.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

namespace tessera {

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

}  // namespace tessera
