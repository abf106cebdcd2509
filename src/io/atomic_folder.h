// A folder that appears under its name complete, or not at all.
//
// Files are written into a temporary folder beside the final one; commit() renames it. What is
// written in it makes itself durable (AtomicFile). Next: atomic_file.h.
#pragma once

#include <filesystem>

namespace tessera {

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
