#include "loader/libtorch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
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
#include "base/text/torch_minor.h"
#include "tessera/error.h"

namespace tessera::loader {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kMostBytes = 1 << 16;
constexpr const char* kLibrary = "lib/libtorch_cpu.so";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Returns the number of `#define NAME number`.
std::optional<int> defined(std::string_view text, std::string_view name) {
  const std::string define = concat("#define ", name, " ");
  const auto at = text.find(define);
  if (at == std::string_view::npos) return std::nullopt;
  const char* const begin = text.data() + at + define.size();
  int number = 0;
  const auto end = std::from_chars(begin, text.data() + text.size(), number);
  return end.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// Returns "2.13" for "2.13.0".
std::string minor_of(const std::string& version) { return version.substr(0, version.rfind('.')); }

std::string with_cuda(bool cuda) { return cuda ? " with CUDA" : ""; }

/// Whether the libtorch fits the build. A build without CUDA also runs with a libtorch that has it.
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

/// Adds the packages of a Python environment.
void add_packages(std::vector<fs::path>& folders, const fs::path& environment) {
  std::error_code ignored;
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(environment / "lib", ignored)) {
    if (entry.path().filename().string().starts_with("python3")) found.push_back(entry.path());
  }
  std::ranges::sort(found);
  for (const fs::path& python : found) folders.push_back(python / "site-packages/torch");
}

/// Returns why users other than root and this one may have changed the file or folder; empty: they
/// cannot.
std::string others_of(const fs::path& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) return {};  // it will not be opened
  if (found.st_uid != 0 && found.st_uid != ::geteuid()) {
    return concat(shown(path), " belongs to the user ", found.st_uid);
  }
  if ((found.st_mode & S_IWOTH) != 0) return concat("everybody may write to ", shown(path));
  if ((found.st_mode & S_IWGRP) != 0 && found.st_gid != ::getegid()) {
    return concat("the group ", found.st_gid, " may write to ", shown(path));
  }
  return {};
}

/// Does what others_of() does, for a folder of which one entry counts, which the sticky bit
/// protects.
std::string others_above(const fs::path& folder) {
  struct stat found{};
  const bool sticky = ::stat(folder.c_str(), &found) == 0 && (found.st_mode & S_ISVTX) != 0;
  return sticky ? std::string() : others_of(folder);
}

/// A folder in which a libtorch may be.
struct Place {
  fs::path folder;
  std::string role = {};  ///< of its folder, for errors
  fs::path copy = {};     ///< set where the folder counts by its place in the copy or next to it

  std::string others() const;
};

std::string Place::others() const {
  if (copy.empty()) return {};
  std::vector<fs::path> all{folder.parent_path(), folder, folder / "lib"};
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder / "lib", ignored)) {
    all.push_back(entry.path());
  }
  std::string why = folder.parent_path() == copy ? others_above(copy.parent_path()) : "";
  for (const fs::path& path : all) {
    if (why.empty()) why = others_of(path);
  }
  return why;
}

std::vector<Place> places(const BuiltFor& built, const fs::path& executable,
                          const base::Environment& environment) {
  std::vector<Place> all;
  const auto value_of = [&](const char* name) {
    const auto variable = environment.find(name);
    return variable == environment.end() ? std::string() : variable->second;
  };
  if (const std::string folder = value_of(kTorchOfWheel); !folder.empty()) {
    all.push_back({folder, ", the torch of the Python that started it"});
  }
  if (!built.folder.empty()) all.push_back({built.folder});
  std::vector<fs::path> packages;
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const std::string folder = value_of(name); !folder.empty()) add_packages(packages, folder);
  }
  for (const fs::path& folder : packages) all.push_back({folder});
  const fs::path copy = executable.parent_path().parent_path().parent_path();
  for (const fs::path& parent : {copy, copy.parent_path()}) {
    for (const char* name : {"torch", "libtorch"}) all.push_back({parent / name, "", copy});
  }
  return all;
}

/// Returns the libtorch of a folder, or of the folder of its CMake files, since CMake accepts both.
std::optional<Libtorch> libtorch_around(const fs::path& folder) {
  auto torch = libtorch_in(folder);
  for (const char* up : {"../..", "../../.."}) {
    const fs::path above = (folder / up).lexically_normal();
    if (!torch) torch = libtorch_in(above.has_filename() ? above : above.parent_path());
  }
  return torch;
}

Libtorch named_libtorch(const BuiltFor& built, const std::string& folder) {
  std::optional<Libtorch> torch;
  try {
    torch = libtorch_around(folder);
  } catch (const Error& error) {
    throw Error(error.kind(), concat("TESSERA_TORCH: found a libtorch in ", shown(folder),
                                     " that cannot be read (", error.what(), "), expected ",
                                     built.torch, with_cuda(built.cuda), ", ", mend(built)));
  }
  std::error_code why;  // not set by ENOENT
  static_cast<void>(fs::exists(fs::path(folder) / kLibrary, why));
  TESSERA_CHECK(torch.has_value(), ErrorKind::kConfig, "TESSERA_TORCH: found no libtorch in ",
                shown(folder), why ? concat(" (", why.message(), ")") : "",
                ", expected the folder that has its lib/ and include/");
  TESSERA_CHECK(fits(*torch, built), ErrorKind::kConfig, "libtorch: found ", found(*torch),
                ", which TESSERA_TORCH names, expected ", built.torch, with_cuda(built.cuda), ", ",
                mend(built));
  return *torch;
}

/// Whether the text is MAJOR.MINOR.
bool is_minor(const std::string& text) {
  static constexpr const char* kDigits = "0123456789";
  const auto dot = text.find_first_not_of(kDigits);
  return dot != std::string::npos && dot > 0 && text[dot] == '.' && dot + 1 < text.size() &&
         text.find_first_not_of(kDigits, dot + 1) == std::string::npos;
}

}  // namespace

BuiltFor read_built_for(const fs::path& file) {
  const std::string where = shown(file);
  const nlohmann::json json = parse_json_object(read_text_file(file, kMostBytes), where);
  const struct {
  } rules;
  BuiltFor built;
  JsonFieldsReader(rules, OtherKeys::kRefused)(built, JsonCursor(json, where, JsonStyle::kData));
  TESSERA_CHECK(is_minor(built.torch), ErrorKind::kFormat, where, ": torch: found \"", built.torch,
                "\", expected MAJOR.MINOR, as 2.13; unpack or install this copy again");
  return built;
}

std::optional<Libtorch> libtorch_in(const fs::path& folder) {
  if (!is_there(folder / kLibrary)) return std::nullopt;
  fs::path header = folder / "include/torch/headeronly/version.h";
  // The header of versions up to 2.9; later it only includes the other one.
  const fs::path older = folder / "include/torch/csrc/api/include/torch/version.h";
  if (!is_there(header) && is_there(older)) header = older;
  const std::string text = read_text_file(header, kMostBytes);
  std::string version;
  for (const char* part : {"MAJOR", "MINOR", "PATCH"}) {
    const std::string name = concat("TORCH_VERSION_", part);
    const auto number = defined(text, name);
    TESSERA_CHECK(number.has_value(), ErrorKind::kFormat, shown(header), ": found no ", name,
                  " in its ", text.size(), " bytes, expected the version; install it again");
    version += concat(version.empty() ? "" : ".", *number);
  }
  std::error_code ignored;
  const fs::path whole = fs::absolute(folder, ignored);
  return Libtorch{ignored ? folder : whole, version, is_there(folder / "lib/libtorch_cuda.so")};
}

namespace {

constexpr std::string_view kAnswer = "\ntessera: torch in ";

/// Bytes that are kept, more than an answer has. Any text may be printed before it.
constexpr std::size_t kMostKept = 8192;

/// Reads the pipe until its end or the end of the answer, and keeps the last bytes. Returns none
/// where `deadline` comes first, also for a python3 that prints without end.
std::optional<std::string> read_answer(int pipe, std::chrono::steady_clock::time_point deadline) {
  std::string said;
  std::array<char, 4096> piece{};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return std::nullopt;
    pollfd ready{pipe, POLLIN, 0};
    const int count = ::poll(&ready, 1, static_cast<int>(left.count()));
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
    if (said.size() > kMostKept) said.erase(0, said.size() - kMostKept);
  }
}

/// Runs in the child between fork and exec, where only some calls are safe.
[[noreturn]] void become_python(pid_t parent, int pipe, char* const* arguments,
                                char* const* variables) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // the parent died before the line above
  ::setpgid(0, 0);                        // so that it can be ended with all that it starts
  ::dup2(pipe, STDOUT_FILENO);
  ::fcntl(STDOUT_FILENO, F_SETFD, 0);  // also where the pipe has that number already
  const int null = ::open("/dev/null", O_RDWR);
  for (const int standard : {STDIN_FILENO, STDERR_FILENO}) ::dup2(null, standard);
  ::execvpe("python3", arguments, variables);
  ::_exit(127);
}

}  // namespace

fs::path torch_of_python(const base::Environment& environment, double seconds) {
  // The working folder does not count as a place for packages.
  static constexpr char kProgram[] =
      "import sys\n"
      "if sys.path and sys.path[0] == '': del sys.path[0]\n"
      "from importlib.machinery import PathFinder\n"
      "from importlib.util import find_spec\n"
      "found = [find_spec('torch'), *(PathFinder.find_spec('torch', [at]) for at in sys.path)]\n"
      // A file torch.py does not count.
      "packages = [one.origin for one in found if one and one.origin and "
      "one.submodule_search_locations]\n"
      "print('\\ntessera: torch in', packages[0].rpartition('/')[0] if packages else '')\n";
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {};
  const base::StringArray arguments({"python3", "-c", kProgram});
  const base::StringArray variables(environment);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) become_python(parent, ends[1], arguments.data(), variables.data());
  ::close(ends[1]);
  if (child < 0) {
    ::close(ends[0]);
    return {};
  }
  const auto wait =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  const auto said = read_answer(ends[0], std::chrono::steady_clock::now() + wait);
  ::close(ends[0]);
  ::setpgid(child, child);  // the child may not have done it yet
  ::kill(-child, SIGKILL);  // once it has answered, it need not end by itself
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
  std::vector<fs::path> told;  // folders in `others`, since several places may have one folder
  const auto fitting = [&](const Place& place) -> std::optional<Libtorch> {
    std::string other;
    try {
      auto torch = libtorch_in(place.folder);
      if (!torch) return std::nullopt;
      std::string why;
      if (fits(*torch, built)) {
        why = place.others();
        if (why.empty()) return torch;
      }
      other = concat(found(*torch), place.role, why.empty() ? "" : ", passed over since ", why);
    } catch (const Error& error) {
      other = concat("one that cannot be read (", error.what(), ")", place.role);
    }
    std::error_code ignored;
    const fs::path folder = fs::canonical(place.folder, ignored);
    if (std::ranges::find(told, folder) != told.end()) return std::nullopt;
    told.push_back(folder);
    others.push_back(other);
    return std::nullopt;
  };
  for (const Place& place : places(built, executable, environment)) {
    if (const auto torch = fitting(place)) return *torch;
  }
  if (const fs::path folder = python(); !folder.empty()) {
    if (const auto torch = fitting({folder})) return *torch;
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

void require_none_loaded(const Libtorch& torch, const std::vector<fs::path>& loaded) {
  for (const fs::path& path : loaded) {
    const std::string name = path.filename();
    if (!name.starts_with("libc10") && !name.starts_with("libtorch")) continue;
    std::error_code ignored;
    TESSERA_CHECK(fs::equivalent(path, torch.folder / "lib" / name, ignored), ErrorKind::kConfig,
                  "libtorch: found ", shown(path), " loaded before it, expected that of ",
                  shown(torch.folder), " alone; take it out of LD_PRELOAD");
  }
}

void require_version(const Libtorch& torch, std::uint64_t abi) {
  const std::string minor = base::torch_minor(abi);
  TESSERA_CHECK(minor == minor_of(torch.version), ErrorKind::kConfig, "libtorch: found ", minor,
                " in ", shown(torch.folder / kLibrary), ", expected ", torch.version,
                ", as its version.h says; install it again");
}

}  // namespace tessera::loader
