// A fresh folder for one test, gone with its end, and the files that tests write and read.
#pragma once

#include <filesystem>
#include <fstream>

#include "support/test.h"

namespace tessera {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  /// Makes the folders that `name` has in it, too.
  std::filesystem::path write(std::string_view name, std::string_view content) const;

 private:
  std::filesystem::path path_;
};

/// Reads the rest of a file; "" where it cannot be read, as one of /proc whose process has ended
/// since it was opened.
std::string text_of(std::ifstream& file);
/// Reads a whole file in the same way, "" where there is none yet.
std::string read_so_far(const std::filesystem::path& path);
/// Throws where there is no such file.
std::string read_file(const std::filesystem::path& path);

}  // namespace tessera
