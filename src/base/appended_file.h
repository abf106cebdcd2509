// A file at whose end a run writes while it goes on: lines of metrics, of a log, records of events.
//
// Each piece is handed to the system at once. No link is followed at the file's own name, whoever
// placed it: neither its target's content nor the link itself is accessed. Folders on the way may be
// links. Pure. Next: io/atomic_file.h, for files that appear whole.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

class AppendedFile {
 public:
  enum class From { kEmpty, kEnd, kNothing };
  /// Opens `path`, or makes it: as an empty file, at the end of what is there, or as one that may
  /// not be there yet. Errors: kIo, for a link or something else that is no regular file by name.
  AppendedFile(std::filesystem::path path, From from);
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Errors: kIo (disk full, ...).
  void append(std::string_view bytes);

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// Errors: kIo where `path` is there and no regular file itself (a link to one is none).
void require_no_link(const std::filesystem::path& path);

/// All bytes of such a file, "" where there is none: of the file that was looked at, whatever
/// stands there since. Errors: as require_no_link(); kIo.
std::string read_no_link(const std::filesystem::path& path);

}  // namespace tessera
