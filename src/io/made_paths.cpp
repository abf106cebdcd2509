#include "io/made_paths.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <system_error>

#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr char kEnd = '\0';  // of a path in a list: no name has it

/// Also a link that leads nowhere has its name taken.
bool is_free(const fs::path& path) {
  std::error_code unknown;  // then it counts as somebody's
  return fs::symlink_status(path, unknown).type() == fs::file_type::not_found;
}

}  // namespace

fs::path whole_path(const fs::path& path) {
  fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

void MadePaths::make(const fs::path& folder, std::string_view key) {
  const fs::path whole = whole_path(folder);
  std::error_code error;
  std::vector<fs::path> absent;  // the innermost first
  for (fs::path path = whole; path != path.root_path() && !fs::exists(path, error);
       path = path.parent_path()) {
    absent.push_back(path);
  }
  error.clear();
  for (std::size_t left = absent.size(); left > 0 && !error; --left) {
    // Another run may make it at the same time: then it is not ours.
    if (fs::create_directory(absent[left - 1], error)) add_folder(absent[left - 1]);
  }
  if (!error) fs::create_directories(whole, error);  // says why it is none
  TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot make ", folder.string(), " (",
                error.message(), ")");
}

void MadePaths::add_folder(const fs::path& folder) {
  const base::Lock lock(mutex_);
  folders_.push_back(whole_path(folder));
}

void MadePaths::expect_file(const fs::path& file) {
  const fs::path whole = whole_path(file);
  const base::Lock lock(mutex_);
  if (is_free(whole)) files_.push_back(whole);
  for (fs::path path = whole.parent_path(); path != path.root_path() && is_free(path);
       path = path.parent_path()) {
    folders_.push_back(path);
  }
}

void MadePaths::add_lock(const fs::path& file) {
  const base::Lock lock(mutex_);
  locks_.push_back(whole_path(file));
}

void MadePaths::remove() const {
  const base::Lock lock(mutex_);
  // What cannot be removed stays: who is refused is told of that alone.
  for (const auto* const files : {&files_, &locks_}) {
    for (const fs::path& path : *files) {
      [[maybe_unused]] const int gone = ::unlink(path.c_str());
    }
  }
  // Of two that one is inside the other the longer path goes first.
  std::vector<fs::path> folders = folders_;
  std::ranges::sort(folders, std::greater(),
                    [](const fs::path& path) { return path.native().size(); });
  for (const fs::path& path : folders) {
    [[maybe_unused]] const int gone = ::rmdir(path.c_str());
  }
}

std::string MadePaths::folders() const {
  const base::Lock lock(mutex_);
  std::string text;
  for (const fs::path& path : folders_) text += path.native() + kEnd;
  return text;
}

void MadePaths::take_folders(std::string_view folders) {
  const base::Lock lock(mutex_);
  for (std::size_t begin = 0; begin < folders.size();) {
    const std::size_t end = std::min(folders.find(kEnd, begin), folders.size());
    folders_.emplace_back(folders.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace tessera
