// CPUs by drawn trees of control groups, and OMP_NUM_THREADS as libgomp reads it.
#include "base/threads/cores.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <random>
#include <thread>

#include "support/temporary_folder.h"

namespace tessera::base::cores_test {
namespace {

class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  int upto(int most) { return std::uniform_int_distribution<int>(0, most)(random_); }
  bool one_in(int count) { return upto(count - 1) == 0; }

 private:
  std::mt19937 random_;
};

/// One hierarchy of a machine as a drawn container sees it.
struct DrawnHierarchy {
  bool is_v2 = false;
  std::string mounts;  ///< its line of mountinfo
  std::string group;   ///< its line of cgroup
};

/// A quota at some groups of the chain from the mount's top to the process, or none; `least` in
/// CPUs, not rounded.
void draw_quota(Draw& draw, const TemporaryFolder& root, const std::string& folder, bool is_v2,
                double& least) {
  const int period = draw.one_in(3) ? 50'000 : 100'000;
  if (draw.one_in(3)) {
    root.write(folder + "/cpu.stat", "");
    return;
  }
  std::string quota = is_v2 ? "max" : "-1";
  if (!draw.one_in(3)) {
    const int us = 1000 + draw.upto(1'600'000);
    quota = std::to_string(us);
    least = std::min(least, static_cast<double>(us) / period);
  }
  if (is_v2) {
    root.write(folder + "/cpu.max", concat(quota, " ", period, "\n"));
  } else {
    root.write(folder + "/cpu.cfs_quota_us", quota + "\n");
    root.write(folder + "/cpu.cfs_period_us", concat(period, "\n"));
  }
}

DrawnHierarchy draw_hierarchy(Draw& draw, const TemporaryFolder& root, bool is_v2, double& least) {
  DrawnHierarchy drawn{is_v2, {}, {}};
  const std::string point = is_v2
                                ? (draw.one_in(2) ? "/sys/fs/cgroup" : "/sys/fs/cgroup/unified")
                                : (draw.one_in(2) ? "/sys/fs/cgroup/cpu,cpuacct" : "/cg roups/cpu");
  std::string escaped = point;
  if (const auto blank = escaped.find(' '); blank != escaped.npos)
    escaped.replace(blank, 1, "\\040");
  // The container cannot see groups above the mount's top.
  const std::string above = draw.one_in(2) ? "/" : "/docker/0123";
  const bool in_namespace = above != "/" && draw.one_in(2);  // it takes its own group for the top
  const std::string shown_root = in_namespace ? "/" : above;
  std::string below;
  const int depth = draw.upto(3);
  std::string folder = point.substr(1);
  draw_quota(draw, root, folder, is_v2, least);
  for (int level = 0; level < depth; ++level) {
    below += concat("/level", level);
    draw_quota(draw, root, concat(folder, below), is_v2, least);
  }
  // The quota of a neighbouring group does not count.
  root.write(folder + (is_v2 ? "/neighbour/cpu.max" : "/neighbour/cpu.cfs_quota_us"),
             is_v2 ? "1000 100000\n" : "1000\n");
  root.write(folder + "/neighbour/cpu.cfs_period_us", "100000\n");
  drawn.mounts = concat(
      "31 23 0:29 ", shown_root, " ", escaped, " rw,relatime", draw.one_in(2) ? " shared:4" : "",
      " - ", is_v2 ? "cgroup2 cgroup2 rw,nsdelegate" : "cgroup cgroup rw,cpu,cpuacct", "\n");
  std::string path = (shown_root == "/" ? "" : shown_root) + below;
  if (path.empty()) path = "/";
  drawn.group = concat(is_v2 ? "0:" : draw.one_in(2) ? "4:cpu,cpuacct" : "1:cpu", ":", path, "\n");
  return drawn;
}

// Property: the result is the least of all quotas from the process's group to the top that its
// container sees, rounded up, for any version, mount and namespace.
TEST(Cores, AQuotaOfAnyDrawnTreeIsFound) {
  int limited = 0;
  for (unsigned seed = 1; seed <= 100; ++seed) {
    Draw draw(seed);
    const TemporaryFolder root;
    double least = INFINITY;
    std::string mounts = "22 1 8:1 / / rw - ext4 /dev/root rw\n";
    std::string groups = "9:name=systemd:/user\n5:cpuset:/elsewhere\n";
    const int versions = draw.upto(2);  // 2: hybrid
    for (const bool is_v2 : {false, true}) {
      if (versions != 2 && is_v2 != (versions == 1)) continue;
      const auto drawn = draw_hierarchy(draw, root, is_v2, least);
      mounts += drawn.mounts;
      groups += drawn.group;
    }
    mounts += "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
    root.write("proc/self/mountinfo", mounts);
    root.write("proc/self/cgroup", groups);
    const auto found = cores_of_quota(root.path());
    if (std::isinf(least)) {
      EXPECT_EQ(found, std::nullopt) << "seed " << seed << "\n" << mounts << groups;
    } else {
      ++limited;
      ASSERT_TRUE(found.has_value()) << "seed " << seed << "\n" << mounts << groups;
      EXPECT_EQ(*found, static_cast<int>(std::ceil(least))) << "seed " << seed;
    }
  }
  EXPECT_GT(limited, 50);
}

TEST(Cores, WhatIsMissingOrMalformedLimitsNothing) {
  const TemporaryFolder root;
  EXPECT_EQ(cores_of_quota(root.path()), std::nullopt);
  root.write("proc/self/mountinfo", "31 23 0:29 / /g rw - cgroup2 cgroup2 rw\nshort\n - \n");
  root.write("proc/self/cgroup", "0::/\nno colon\n:\n");
  EXPECT_EQ(cores_of_quota(root.path()), std::nullopt);
  for (const char* text : {"", "\n", "max", "max 100000", "0 100000", "-5 100000", "200000 0",
                           "200000", "x 100000", "200000 100000 1", "99999999999999999999 1"}) {
    root.write("g/cpu.max", text);
    EXPECT_EQ(cores_of_quota(root.path()), std::nullopt) << text;
  }
  root.write("g/cpu.max", "200001 100000\n");
  EXPECT_EQ(cores_of_quota(root.path()), 3);
}

TEST(Cores, AreThoseOfThisProcessAtMost) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), static_cast<int>(std::thread::hardware_concurrency()));
}

/// As libgomp's parse_unsigned_long_list does: strtoul, number by number.
bool libgomp_takes(const std::string& text) {
  const char* at = text.c_str();
  for (;;) {
    while (std::isspace(static_cast<unsigned char>(*at)) != 0) ++at;
    if (*at == '\0') return false;
    errno = 0;
    char* end = nullptr;
    const auto value = static_cast<long>(std::strtoul(at, &end, 10));
    if (errno != 0 || value <= 0 || end == at) return false;
    while (std::isspace(static_cast<unsigned char>(*end)) != 0) ++end;
    if (*end == '\0') return true;
    if (*end != ',') return false;
    at = end + 1;
  }
}

// Property: for any text of these characters the answer is that of libgomp's own parser.
TEST(Cores, ThreadsAreGivenByWhatLibgompTakesForANumber) {
  for (const char* text : {"", "0", " ", "00", "-1", "x", "4x", "1,", ",1", "1,0", "+"}) {
    EXPECT_FALSE(gives_threads(text)) << "'" << text << "'";
  }
  for (const char* text : {"1", " 8", "8 ", "+2", "4,2", "4 , 2", "007"}) {
    EXPECT_TRUE(gives_threads(text)) << "'" << text << "'";
  }
  Draw draw(7);
  const std::string characters = "0012 9,+-x\t";
  int taken = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (int length = draw.upto(6); length > 0; --length) {
      text +=
          characters[static_cast<std::size_t>(draw.upto(static_cast<int>(characters.size()) - 1))];
    }
    EXPECT_EQ(gives_threads(text), libgomp_takes(text)) << "'" << text << "'";
    taken += libgomp_takes(text) ? 1 : 0;
  }
  EXPECT_GT(taken, 1000);
}

}  // namespace
}  // namespace tessera::base::cores_test
