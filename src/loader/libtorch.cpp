#include "loader/libtorch.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>

#include "base/mapped_file.h"
#include "base/text/json_fields.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::loader {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kMostBytes = 1 << 16;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// The number of `#define NAME number`.
std::optional<int> defined(std::string_view text, std::string_view name) {
  const std::string define = concat("#define ", name, " ");
  const auto at = text.find(define);
  if (at == std::string_view::npos) return std::nullopt;
  const char* const begin = text.data() + at + define.size();
  int number = 0;
  const auto end = std::from_chars(begin, text.data() + text.size(), number);
  return end.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// "2.13" of "2.13.0".
std::string minor_of(const std::string& version) { return version.substr(0, version.rfind('.')); }

std::string with_cuda(bool cuda) { return cuda ? " with CUDA" : ""; }

/// A package built without CUDA runs with a libtorch that has it.
bool fits(const Libtorch& torch, const BuiltFor& built) {
  return minor_of(torch.version) == built.torch && (torch.cuda || !built.cuda);
}

std::string found(const Libtorch& torch) {
  return concat(torch.version, torch.cuda ? " with" : " without", " CUDA in ", shown(torch.folder));
}

std::string mend(const BuiltFor& built) {
  return concat("with which this tessera was built; do `pip install 'torch==", built.torch,
                ".*'` in the Python environment, set TESSERA_TORCH to the folder of such a "
                "libtorch, or build tessera with another");
}

/// The packages of a Python environment.
void add_packages(std::vector<fs::path>& folders, const fs::path& environment) {
  std::error_code ignored;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(environment / "lib", ignored)) {
    if (entry.path().filename().string().starts_with("python3")) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  for (const fs::path& python : found) folders.push_back(python / "site-packages/torch");
}

std::vector<fs::path> places(const BuiltFor& built, const fs::path& executable,
                             const base::Environment& environment) {
  std::vector<fs::path> folders;
  if (!built.folder.empty()) folders.emplace_back(built.folder);
  const fs::path copy = executable.parent_path().parent_path().parent_path();
  for (const fs::path& place : {copy, copy.parent_path()}) {
    for (const char* name : {"torch", "libtorch"}) folders.push_back(place / name);
  }
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const auto variable = environment.find(name);
    if (variable != environment.end() && !variable->second.empty()) {
      add_packages(folders, variable->second);
    }
  }
  return folders;
}

Libtorch named_libtorch(const BuiltFor& built, const std::string& folder) {
  const auto torch = libtorch_in(folder);
  TESSERA_CHECK(torch.has_value(), ErrorKind::kConfig, "TESSERA_TORCH: found no libtorch in ",
                shown(folder), ", expected the folder that has its lib/ and include/");
  TESSERA_CHECK(fits(*torch, built), ErrorKind::kConfig, "libtorch: found ", found(*torch),
                ", which TESSERA_TORCH names, expected ", built.torch, with_cuda(built.cuda), ", ",
                mend(built));
  return *torch;
}

}  // namespace

BuiltFor read_built_for(const fs::path& file) {
  const std::string where = shown(file);
  const nlohmann::json json = parse_json_object(read_text_file(file, kMostBytes), where);
  const struct {
  } rules;
  BuiltFor built;
  JsonFieldsReader(rules, OtherKeys::kRefused)(built, JsonCursor(json, where, JsonStyle::kData));
  return built;
}

std::optional<Libtorch> libtorch_in(const fs::path& folder) {
  const fs::path header = folder / "include/torch/headeronly/version.h";
  if (!is_there(folder / "lib/libtorch_cpu.so") || !is_there(header)) return std::nullopt;
  const std::string text = read_text_file(header, kMostBytes);
  std::string version;
  for (const char* part : {"MAJOR", "MINOR", "PATCH"}) {
    const auto number = defined(text, concat("TORCH_VERSION_", part));
    if (!number) return std::nullopt;
    version += concat(version.empty() ? "" : ".", *number);
  }
  std::error_code ignored;
  const fs::path whole = fs::absolute(folder, ignored);
  return Libtorch{ignored ? folder : whole, version, is_there(folder / "lib/libtorch_cuda.so")};
}

fs::path torch_of_python() {
  // The folder of the command is no place for packages here.
  static constexpr char kProgram[] =
      "import sys; sys.path[:1] = []\n"
      "from importlib.util import find_spec\n"
      "found = find_spec('torch')\n"
      "print(found.origin.rpartition('/')[0] if found and found.origin else '', end='')\n";
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  std::string python = "python3";
  std::string option = "-c";
  std::string program = kProgram;
  const std::array<char*, 4> arguments{python.data(), option.data(), program.data(), nullptr};
  pid_t child = 0;
  const int failed =
      ::posix_spawnp(&child, "python3", &files, nullptr, arguments.data(), ::environ);
  ::posix_spawn_file_actions_destroy(&files);
  ::close(ends[1]);
  std::string said;
  std::array<char, 4096> piece{};
  for (ssize_t count = 0;
       failed == 0 && (count = ::read(ends[0], piece.data(), piece.size())) > 0;) {
    said.append(piece.data(), static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  int status = 0;
  if (failed != 0 || ::waitpid(child, &status, 0) != child || status != 0) return {};
  return said;
}

Libtorch find_libtorch(const BuiltFor& built, const fs::path& executable,
                       const base::Environment& environment,
                       const std::function<fs::path()>& python) {
  const auto named = environment.find("TESSERA_TORCH");
  if (named != environment.end() && !named->second.empty()) {
    return named_libtorch(built, named->second);
  }
  std::string others;
  const auto fitting = [&](const fs::path& folder) -> std::optional<Libtorch> {
    const auto torch = libtorch_in(folder);
    if (torch && fits(*torch, built)) return torch;
    if (torch) others += concat(others.empty() ? "" : ", ", found(*torch));
    return std::nullopt;
  };
  for (const fs::path& folder : places(built, executable, environment)) {
    if (const auto torch = fitting(folder)) return *torch;
  }
  if (const fs::path folder = python(); !folder.empty()) {
    if (const auto torch = fitting(folder)) return *torch;
  }
  throw Error(ErrorKind::kConfig,
              concat("libtorch: found ", others.empty() ? "none" : others, ", expected ",
                     built.torch, with_cuda(built.cuda), ", ", mend(built)));
}

std::vector<fs::path> libraries_of(const Libtorch& torch, const BuiltFor& built) {
  std::vector<fs::path> libraries{torch.folder / "lib/libtorch_cpu.so"};
  if (built.cuda) libraries.push_back(torch.folder / "lib/libtorch_cuda.so");
  libraries.push_back(torch.folder / "lib/libtorch.so");
  return libraries;
}

}  // namespace tessera::loader
