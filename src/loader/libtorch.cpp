#include "loader/libtorch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "base/mapped_file.h"
#include "base/string_array.h"
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

/// Whether only root and this user can have put a file into the folder.
bool is_ours(const fs::path& folder) {
  struct stat found{};
  if (::stat(folder.c_str(), &found) != 0) return false;
  return (found.st_uid == 0 || found.st_uid == ::geteuid()) && (found.st_mode & S_IWOTH) == 0;
}

std::vector<fs::path> places(const BuiltFor& built, const fs::path& executable,
                             const base::Environment& environment) {
  std::vector<fs::path> folders;
  if (!built.folder.empty()) folders.emplace_back(built.folder);
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const auto variable = environment.find(name);
    if (variable != environment.end() && !variable->second.empty()) {
      add_packages(folders, variable->second);
    }
  }
  const fs::path copy = executable.parent_path().parent_path().parent_path();
  for (const fs::path& place : {copy, copy.parent_path()}) {
    for (const char* name : {"torch", "libtorch"}) {
      if (is_ours(place) && is_ours(place / name)) folders.push_back(place / name);
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

namespace {

constexpr std::string_view kAnswer = "\ntessera: torch in ";

/// Reads the pipe until its end or that of the answer; none where `deadline` comes first.
std::optional<std::string> read_answer(int pipe, std::chrono::steady_clock::time_point deadline) {
  std::string said;
  std::array<char, 4096> piece{};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd ready{pipe, POLLIN, 0};
    const int count = ::poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    const ssize_t length = ::read(pipe, piece.data(), piece.size());
    if (length <= 0) return said;
    said.append(piece.data(), static_cast<std::size_t>(length));
    // A process that python3 has left behind may hold the pipe open.
    const auto at = said.find(kAnswer);
    if (at != std::string::npos && said.find('\n', at + kAnswer.size()) != std::string::npos) {
      return said;
    }
  }
}

}  // namespace

fs::path torch_of_python(const base::Environment& environment, double seconds) {
  // The folder of the command is no place for packages here.
  static constexpr char kProgram[] =
      "import sys\n"
      "if sys.path and sys.path[0] == '': del sys.path[0]\n"
      "from importlib.util import find_spec\n"
      "found = find_spec('torch')\n"
      "print('\\ntessera: torch in', found.origin.rpartition('/')[0] if found and found.origin "
      "else '')\n";
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  const base::StringArray arguments({"python3", "-c", kProgram});
  const base::StringArray variables(environment);
  pid_t child = 0;
  const int failed =
      ::posix_spawnp(&child, "python3", &files, nullptr, arguments.data(), variables.data());
  ::posix_spawn_file_actions_destroy(&files);
  ::close(ends[1]);
  if (failed != 0) {
    ::close(ends[0]);
    return {};
  }
  const auto wait =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  const auto said = read_answer(ends[0], std::chrono::steady_clock::now() + wait);
  ::close(ends[0]);
  ::kill(child, SIGKILL);  // where it has answered, its end is not waited for
  ::waitpid(child, nullptr, 0);
  TESSERA_CHECK(said.has_value(), ErrorKind::kConfig,
                "libtorch: found that python3 does not say within ", seconds,
                " s where its package torch is, expected an answer; set TESSERA_TORCH to the "
                "folder of a libtorch");
  const auto at = said->find(kAnswer);
  if (at == std::string::npos) return {};
  const auto begin = at + kAnswer.size();
  return said->substr(begin, said->find('\n', begin) - begin);
}

Libtorch find_libtorch(const BuiltFor& built, const fs::path& executable,
                       const base::Environment& environment,
                       const std::function<fs::path()>& python) {
  const auto named = environment.find("TESSERA_TORCH");
  if (named != environment.end() && !named->second.empty()) {
    return named_libtorch(built, named->second);
  }
  std::vector<std::string> others;
  const auto fitting = [&](const fs::path& folder) -> std::optional<Libtorch> {
    try {
      const auto torch = libtorch_in(folder);
      if (torch && fits(*torch, built)) return torch;
      if (torch) others.push_back(found(*torch));
    } catch (const Error& error) {
      others.push_back(concat("one that cannot be read (", error.what(), ")"));
    }
    return std::nullopt;
  };
  for (const fs::path& folder : places(built, executable, environment)) {
    if (const auto torch = fitting(folder)) return *torch;
  }
  if (const fs::path folder = python(); !folder.empty()) {
    if (const auto torch = fitting(folder)) return *torch;
  }
  throw Error(ErrorKind::kConfig, concat("libtorch: found ", joined(others, "none"), ", expected ",
                                         built.torch, with_cuda(built.cuda), ", ", mend(built)));
}

std::vector<fs::path> libraries_of(const Libtorch& torch, const BuiltFor& built) {
  std::vector<fs::path> libraries;
  const auto add = [&](const char* name) { libraries.push_back(torch.folder / "lib" / name); };
  if (is_there(torch.folder / "lib/libgomp.so.1")) add("libgomp.so.1");
  add("libc10.so");
  if (built.cuda) add("libc10_cuda.so");
  add("libtorch_cpu.so");
  if (built.cuda) add("libtorch_cuda.so");
  add("libtorch.so");
  return libraries;
}

}  // namespace tessera::loader
