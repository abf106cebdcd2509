#include "base/threads/cores.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::base {
namespace {

namespace fs = std::filesystem;

/// A mounted hierarchy of control groups that may limit CPUs.
struct Hierarchy {
  bool is_v2 = false;
  std::string root;   ///< the group that the mount shows as its top: a container sees its own
  std::string point;  ///< where it is mounted
};

std::vector<std::string> split(std::string_view text, char between) {
  std::vector<std::string> parts;
  std::istringstream stream{std::string(text)};
  for (std::string part; std::getline(stream, part, between);) parts.push_back(part);
  return parts;
}

bool has_word(std::string_view list, std::string_view word) {
  const auto words = split(list, ',');
  return std::ranges::find(words, word) != words.end();
}

/// Unescapes a path: mountinfo writes a blank as \040.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(digits, digits + 3, code, 8).ptr == digits + 3) {
      plain += static_cast<char>(code);
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

/// Parses "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAGS...] - TYPE SOURCE OPTIONS".
std::optional<Hierarchy> hierarchy_of(const std::string& line) {
  const auto dash = line.find(" - ");
  if (dash == std::string::npos) return std::nullopt;
  const auto before = split(std::string_view(line).substr(0, dash), ' ');
  const auto behind = split(std::string_view(line).substr(dash + 3), ' ');
  if (before.size() < 5 || behind.empty()) return std::nullopt;
  const bool is_v2 = behind[0] == "cgroup2";
  const bool is_v1 = behind[0] == "cgroup" && behind.size() > 2 && has_word(behind[2], "cpu");
  if (!is_v1 && !is_v2) return std::nullopt;
  return Hierarchy{is_v2, unescaped(before[3]), unescaped(before[4])};
}

/// Returns this process's group in a hierarchy: from "0::PATH" of version 2, "N:cpu,...:PATH" of
/// version 1.
std::optional<std::string> group_in(const Hierarchy& hierarchy,
                                    const std::vector<std::string>& lines) {
  for (const std::string& line : lines) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (hierarchy.is_v2 ? controllers.empty() : has_word(controllers, "cpu")) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream stream(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) return std::nullopt;
  return value;
}

/// Returns the CPUs that a quota of microseconds in each period grants, rounded up.
std::optional<int> cores_of(std::string_view quota_us, std::string_view period_us) {
  const auto quota = number(quota_us);  // none for "max" and -1
  const auto period = number(period_us);
  if (!quota || !period) return std::nullopt;
  const std::int64_t cores = *quota / *period + (*quota % *period != 0 ? 1 : 0);
  return static_cast<int>(std::min<std::int64_t>(cores, std::numeric_limits<int>::max()));
}

std::optional<int> cores_of_group(const fs::path& folder, bool is_v2) {
  const auto first_line = [&](const char* name) {
    const auto lines = lines_of(folder / name);
    return lines.empty() ? std::string() : lines.front();
  };
  if (!is_v2) return cores_of(first_line("cpu.cfs_quota_us"), first_line("cpu.cfs_period_us"));
  const auto words = split(first_line("cpu.max"), ' ');
  return words.size() == 2 ? cores_of(words[0], words[1]) : std::nullopt;
}

/// Returns the path of `group` below the mount; the mount's top where it shows another part of the
/// hierarchy.
fs::path below_mount(const Hierarchy& hierarchy, const std::string& group) {
  const fs::path relative = fs::path(group).lexically_relative(hierarchy.root);
  return relative.empty() || *relative.begin() == ".." ? fs::path(".") : relative;
}

}  // namespace

std::optional<int> cores_of_quota(const fs::path& root) {
  const auto groups = lines_of(root / "proc/self/cgroup");
  std::optional<int> least;
  for (const std::string& line : lines_of(root / "proc/self/mountinfo")) {
    const auto hierarchy = hierarchy_of(line);
    const auto group = hierarchy ? group_in(*hierarchy, groups) : std::nullopt;
    if (!group) continue;
    const fs::path top = root / fs::path(hierarchy->point).relative_path();
    fs::path folder = top;
    const auto look_at = [&](const fs::path& at) {
      const auto cores = cores_of_group(at, hierarchy->is_v2);
      if (cores && (!least || *cores < *least)) least = cores;
    };
    look_at(top);
    for (const fs::path& name : below_mount(*hierarchy, *group)) look_at(folder /= name);
  }
  return least;
}

int usable_cores() {
  int cores = 1;
  // The kernel refuses a mask that is smaller than its own.
  for (int most = CPU_SETSIZE; most <= (1 << 20); most *= 2) {
    cpu_set_t* const set = CPU_ALLOC(most);
    const std::size_t bytes = CPU_ALLOC_SIZE(most);
    const bool known = ::sched_getaffinity(0, bytes, set) == 0;
    if (known) cores = CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
    if (known) break;
  }
  return std::max(1, std::min(cores, cores_of_quota().value_or(cores)));
}

bool gives_threads(std::string_view text) {
  const auto skip_blanks = [&] {
    while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())) != 0) {
      text.remove_prefix(1);
    }
  };
  for (;;) {
    skip_blanks();
    if (text.starts_with('+')) text.remove_prefix(1);
    std::int64_t threads = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
    if (error != std::errc() || threads <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    skip_blanks();
    if (text.empty()) return true;
    if (!text.starts_with(',')) return false;
    text.remove_prefix(1);
  }
}

}  // namespace tessera::base
