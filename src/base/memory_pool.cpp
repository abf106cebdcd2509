#include "base/memory_pool.h"

#include <sys/stat.h>

#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr double kKib = 1024.0;
constexpr double kNoLimit = 0x1p62;  // version 1 of control groups writes a number for none

std::string first_line(const fs::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}

std::optional<double> number_in(const fs::path& file) {
  double number = 0;
  return std::ifstream(file) >> number ? std::optional(number) : std::nullopt;
}

/// "NAME NUMBER" or "NAME: NUMBER kB", a line each.
std::map<std::string, double> numbers_by_name(const fs::path& file) {
  std::map<std::string, double> numbers;
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    double number = 0;
    if (!(words >> name >> number)) continue;
    if (name.ends_with(':')) name.pop_back();
    numbers[name] = number;
  }
  return numbers;
}

/// The kernel, and what a container may have for itself of /proc: other containers on the same
/// kernel then count as other hosts.
std::string host_id(const fs::path& root) {
  std::error_code ignored;
  return concat(first_line(root / "proc/sys/kernel/random/boot_id"), " ",
                fs::read_symlink(root / "proc/self/ns/mnt", ignored).native());
}

struct Swap {
  double size_bytes = 0;
  double left_bytes = 0;
};

/// One version of control groups: where they hang, and how they say what they hold.
struct Hierarchy {
  fs::path top;
  std::string_view limit_file;
  std::string_view unmovable;  ///< in memory.stat: what only swap could take
};

std::optional<MemoryPool> pool_of(const fs::path& group, const Hierarchy& hierarchy,
                                  const Swap& swap) {
  const fs::path file = group / hierarchy.limit_file;
  const auto limit = number_in(file);  // "max" is none
  struct stat found = {};
  if (!limit || *limit >= kNoLimit || ::stat(group.c_str(), &found) != 0) return std::nullopt;
  const auto held = numbers_by_name(group / "memory.stat");
  const auto anonymous = held.find(std::string(hierarchy.unmovable));
  const double used = anonymous == held.end() ? 0.0 : anonymous->second;
  return MemoryPool{concat("group ", found.st_dev, ":", found.st_ino), file.string(),
                    *limit + swap.size_bytes, *limit - used + swap.left_bytes};
}

/// The path of this process's group below the top; none where the process has none there.
std::optional<fs::path> group_of(const fs::path& root, bool version_2) {
  std::ifstream lines(root / "proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {  // "4:memory,cpu:/a/b", "0::/a/b"
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = concat(",", line.substr(first + 1, second - first - 1), ",");
    const bool fits = version_2 ? controllers == ",," : controllers.find(",memory,") != line.npos;
    if (fits) return fs::path(line.substr(second + 1)).relative_path();
  }
  return std::nullopt;
}

void add_groups(std::vector<MemoryPool>& pools, const fs::path& root, const Hierarchy& hierarchy,
                bool version_2, const Swap& swap) {
  const auto group = group_of(root, version_2);
  if (!group) return;
  // In a container the path may be the host's, and the container's own group stands at the top.
  std::error_code ignored;
  const bool there = fs::is_directory(hierarchy.top / *group, ignored);
  for (fs::path part = there ? *group : fs::path();; part = part.parent_path()) {
    const fs::path folder = part.empty() ? hierarchy.top : hierarchy.top / part;
    if (auto pool = pool_of(folder, hierarchy, swap)) pools.push_back(std::move(*pool));
    if (part.empty()) return;
  }
}

}  // namespace

std::vector<MemoryPool> memory_pools(const fs::path& root) {
  std::vector<MemoryPool> pools;
  auto host = numbers_by_name(root / "proc/meminfo");
  const Swap swap{host["SwapTotal"] * kKib, host["SwapFree"] * kKib};
  const std::string id = host_id(root);
  if (host["MemTotal"] > 0 && host.contains("MemAvailable")) {
    pools.push_back({concat("host ", id), (root / "proc/meminfo").string(),
                     host["MemTotal"] * kKib + swap.size_bytes,
                     host["MemAvailable"] * kKib + swap.left_bytes});
  }
  const std::size_t groups = pools.size();
  add_groups(pools, root, {root / "sys/fs/cgroup", "memory.max", "anon"}, true, swap);
  add_groups(pools, root, {root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "total_rss"},
             false, swap);
  // Numbers of groups are those of one kernel.
  for (std::size_t i = groups; i < pools.size(); ++i) pools[i].id += concat(" ", id);
  return pools;
}

}  // namespace tessera
