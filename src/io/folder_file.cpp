#include "io/folder_file.h"

#include <algorithm>
#include <system_error>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_inside(const fs::path& file, const fs::path& folder) {
  const auto [rest, unused] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return rest == folder.end();
}

fs::path real_path(const fs::path& path) {
  std::error_code failed;
  fs::path real = fs::canonical(path, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot open ", shown(path), ": ", failed.message());
  return real;
}

}  // namespace

bool is_plain_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 255;
  return !name.empty() && name.size() <= kLongest && name != "." && name != ".." &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20U || c == '\x7F';
         });
}

fs::path file_inside(const fs::path& folder, const std::string& name) {
  const fs::path real_folder = real_path(folder);
  const fs::path real_file = real_path(folder / name);
  if (is_inside(real_file, real_folder)) return folder / name;
  // models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH is how the hub's cache shares files.
  const bool is_snapshot = real_folder.parent_path().filename() == "snapshots";
  const fs::path blobs = real_folder.parent_path().parent_path() / "blobs";
  TESSERA_CHECK(is_snapshot && is_inside(real_file, blobs), ErrorKind::kFormat, folder.native(),
                ": ", printable(name), " is a link to ", shown(real_file),
                ", expected a file inside the folder; copy it there");
  return folder / name;
}

std::optional<fs::path> optional_file_inside(const fs::path& folder, const std::string& name) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(folder / name, ignored))) return std::nullopt;
  fs::path file = file_inside(folder, name);
  TESSERA_CHECK(fs::is_regular_file(file, ignored), ErrorKind::kFormat, folder.native(), ": ",
                printable(name), " is no plain file, expected one");
  return file;
}

}  // namespace tessera
