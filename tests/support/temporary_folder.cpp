#include "support/temporary_folder.h"

#include <unistd.h>

#include <sstream>
#include <stdexcept>

namespace tessera {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "tessera_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path TemporaryFolder::write(std::string_view name, std::string_view content) const {
  const auto file = path_ / name;
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << content;
  return file;
}

std::string text_of(std::ifstream& file) {
  std::ostringstream text;
  text << file.rdbuf();  // keeps the error of a read as a state; an iterator would throw it
  return text.fail() ? "" : text.str();
}

std::string read_so_far(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return text_of(file);
}

std::string read_file(const fs::path& path) {
  if (!fs::exists(path)) throw std::runtime_error("found no file '" + path.string() + "'");
  return read_so_far(path);
}

}  // namespace tessera
