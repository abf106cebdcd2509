#include "io/atomic_folder.h"

#include <unistd.h>

#include <string>
#include <system_error>

#include "base/printable.h"
#include "io/atomic_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// Links followed, no slash at the end: what a rename can replace.
fs::path final_path(const fs::path& path) {
  std::error_code failed;
  fs::path whole = fs::weakly_canonical(fs::absolute(path), failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot reach ", shown(path), ": ", failed.message());
  return whole.has_filename() ? whole : whole.parent_path();
}

}  // namespace

AtomicFolder::AtomicFolder(const fs::path& path) : path_(final_path(path)) {
  std::error_code failed;
  if (fs::exists(path_, failed)) {
    TESSERA_CHECK(
        fs::is_directory(path_, failed) && fs::is_empty(path_, failed) && !failed,
        ErrorKind::kUsage, shown(path_),
        ": found something there, expected no such folder or an empty one; choose another "
        "name or remove it");
  }
  temporary_ = path_;
  temporary_ += "." + std::to_string(::getpid()) + ".tmp";
  const auto check_made = [&] {
    TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot make ", shown(temporary_), ": ",
                  failed.message());
  };
  fs::remove_all(temporary_, failed);  // of a process that had our number
  fs::create_directories(temporary_.parent_path(), failed);
  check_made();
  // Ours alone: a folder, or a link to one, that came in between is not taken for it.
  const bool is_new = fs::create_directory(temporary_, failed);
  check_made();
  TESSERA_CHECK(is_new, ErrorKind::kIo, "cannot make ", shown(temporary_),
                ": found one that another program just made, expected none");
}

AtomicFolder::~AtomicFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

void AtomicFolder::commit() {
  TESSERA_INVARIANT(!temporary_.empty(), "second commit of ", path_.native());
  sync_folder(temporary_);
  std::error_code failed;
  fs::rename(temporary_, path_, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot rename the finished folder to ", shown(path_),
                ": ", failed.message());
  temporary_.clear();
  sync_folder(path_.parent_path());
}

}  // namespace tessera
