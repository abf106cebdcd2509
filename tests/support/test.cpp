#include "support/test.h"

#include <unistd.h>

#include "support/temporary_folder.h"

namespace tessera {

namespace fs = std::filesystem;

bool Says::all_in(const std::string& text, std::ostream* why) const {
  const auto missing = std::ranges::find_if(
      parts_, [&](const auto& part) { return text.find(part) == std::string::npos; });
  if (missing == parts_.end()) return true;
  if (why != nullptr) *why << "which does not say " << ::testing::PrintToString(*missing);
  return false;
}

void Says::DescribeTo(std::ostream* out) const {
  *out << "says " << ::testing::PrintToString(parts_);
}

void Says::DescribeNegationTo(std::ostream* out) const {
  *out << "does not say all of " << ::testing::PrintToString(parts_);
}

std::string refusal_of(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.kind()), to_string(kind)) << error.what();
    return error.what();
  }
  return "";
}

std::string refusal_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
  return "";
}

std::string error_of(ErrorKind kind, const std::function<void()>& action) {
  auto message = refusal_of(kind, action);
  EXPECT_NE(message, "") << "no error was thrown";
  return message;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

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

}  // namespace tessera
