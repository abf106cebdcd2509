// A file to which a run appends while it runs: lines of metrics, lines of a log, records of events.
//
// Each piece is passed to the system at once. A link in place of the file is never followed:
// neither its target's content nor the link itself is accessed. Folders on the way may be links.
// Pure. Next: io/atomic_file.h, for files that appear whole.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

class AppendedFile {
 public:
  enum class From { kEmpty, kEnd, kNothing };
  /// Opens or makes `path`: emptied, at its end, or as a file that must not exist yet. Errors: kIo,
  /// naming the file, for a link or another thing that is no regular file.
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

/// Errors: kIo where `path` exists and is no regular file itself; a link to one is none.
void require_no_link(const std::filesystem::path& path);

/// Returns all bytes of such a file, "" where there is none. It reads the file that was checked,
/// even if another one has replaced it since. Errors: as require_no_link(); kIo.
std::string read_no_link(const std::filesystem::path& path);

}  // namespace tessera
