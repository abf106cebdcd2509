// What is left of the host's memory and of the limits around a process, from files as the kernel
// writes them.
#include "base/memory_pool.h"

#include <gmock/gmock.h>

#include <set>

#include "unit/io/temporary_folder.h"

namespace tessera::memory_pool_test {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using testing::TemporaryFolder;

constexpr double kKib = 1024;

struct Found {
  std::string name;
  double size = 0;
  double left = 0;
  bool operator==(const Found&) const = default;
};

void PrintTo(const Found& found, std::ostream* out) {
  *out << found.name << " " << found.left << " of " << found.size;
}

/// Names from the root on.
std::vector<Found> found_in(const TemporaryFolder& root) {
  std::vector<Found> found;
  for (const MemoryPool& pool : memory_pools(root.path())) {
    found.push_back({std::filesystem::relative(pool.name, root.path()).string(), pool.size_bytes,
                     pool.left_bytes});
  }
  return found;
}

void write_host(const TemporaryFolder& root) {
  root.write("proc/meminfo",
             "MemTotal:       1000 kB\nMemFree:   10 kB\nMemAvailable:    600 kB\n"
             "Cached:  500 kB\nSwapTotal:   200 kB\nSwapFree:    50 kB\nHugePages_Total:    0\n");
  root.write("proc/sys/kernel/random/boot_id", "b2c952f9\n");
}

const Found kHost{"proc/meminfo", 1200 * kKib, 650 * kKib};

TEST(MemoryPool, OfAHostIsWhatTheKernelCanGiveWithSwap) {
  const TemporaryFolder root;
  write_host(root);
  EXPECT_THAT(found_in(root), ElementsAre(kHost));
}

// A page cache that fills a group is no use of it: the kernel takes it back.
TEST(MemoryPool, OfEveryGroupWithALimitIsTheLimitLessWhatOnlySwapCouldTake) {
  const TemporaryFolder root;
  write_host(root);
  root.write("proc/self/cgroup", "0::/jobs/7\n");
  root.write("sys/fs/cgroup/memory.stat", "anon 1\n");  // the top has no limit
  root.write("sys/fs/cgroup/jobs/memory.max", "1048576\n");
  root.write("sys/fs/cgroup/jobs/memory.stat", "anon 8192\nfile 900000\n");
  root.write("sys/fs/cgroup/jobs/memory.current", "1048000\n");
  root.write("sys/fs/cgroup/jobs/7/memory.max", "max\n");
  root.write("sys/fs/cgroup/jobs/7/memory.stat", "anon 4096\n");
  const Found outer{"sys/fs/cgroup/jobs/memory.max", 1224 * kKib, (1024 - 8 + 50) * kKib};
  EXPECT_THAT(found_in(root), ElementsAre(kHost, outer));
  root.write("sys/fs/cgroup/jobs/7/memory.max", "65536\n");
  EXPECT_THAT(
      found_in(root),
      ElementsAre(kHost, Found{"sys/fs/cgroup/jobs/7/memory.max", 264 * kKib, (64 - 4 + 50) * kKib},
                  outer));
}

TEST(MemoryPool, OfVersionOneOfGroupsIsReadToo) {
  const TemporaryFolder root;
  write_host(root);
  root.write("proc/self/cgroup", "9:cpu:/x\n4:hugetlb,memory:/jobs\n0::/\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "65536\n");
  root.write("sys/fs/cgroup/memory/jobs/memory.stat", "rss 1\ntotal_rss 4096\n");
  EXPECT_THAT(found_in(root),
              ElementsAre(kHost, Found{"sys/fs/cgroup/memory/jobs/memory.limit_in_bytes",
                                       264 * kKib, (64 - 4 + 50) * kKib}));
}

// The container's own group is at the top there, and the path is that of the host.
TEST(MemoryPool, OfAContainerIsAtTheTop) {
  const TemporaryFolder root;
  write_host(root);
  root.write("proc/self/cgroup", "0::/../machine/abc\n");
  root.write("sys/fs/cgroup/memory.max", "65536\n");
  EXPECT_THAT(found_in(root),
              ElementsAre(kHost, Found{"sys/fs/cgroup/memory.max", 264 * kKib, (64 + 50) * kKib}));
}

TEST(MemoryPool, IdsAreThoseOfTheBytes) {
  const TemporaryFolder root;
  write_host(root);
  root.write("proc/self/cgroup", "0::/a\n");
  root.write("sys/fs/cgroup/memory.max", "65536\n");
  root.write("sys/fs/cgroup/a/memory.max", "65536\n");
  const auto ids = [&] {
    std::vector<std::string> all;
    for (const MemoryPool& pool : memory_pools(root.path())) all.push_back(pool.id);
    return all;
  };
  const auto before = ids();
  EXPECT_EQ(std::set(before.begin(), before.end()).size(), 3U);
  root.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 1 kB\n");
  EXPECT_EQ(ids(), before);
  root.write("proc/self/cgroup", "0::/\n");  // a process outside of the inner group
  EXPECT_THAT(ids(), ElementsAre(before[0], before[2]));
  root.write("proc/sys/kernel/random/boot_id", "another\n");
  for (const std::string& id : ids()) EXPECT_EQ(std::ranges::count(before, id), 0) << id;
}

TEST(MemoryPool, WhatCannotBeReadIsNoLimit) {
  const TemporaryFolder root;
  EXPECT_THAT(memory_pools(root.path()), IsEmpty());
  root.write("proc/meminfo", "MemTotal: none\nMemAvailable\n:\n");
  root.write("proc/self/cgroup", "0\n::\n0::\n4:memory\n");
  root.write("sys/fs/cgroup/memory.max", "lots\n");
  EXPECT_THAT(memory_pools(root.path()), IsEmpty());
  const auto here = memory_pools();
  ASSERT_FALSE(here.empty());
  EXPECT_THAT(here.front().name, EndsWith("meminfo"));
  for (const MemoryPool& pool : here) {
    EXPECT_GT(pool.size_bytes, 0x1p20) << pool.name;
    EXPECT_LE(pool.left_bytes, pool.size_bytes) << pool.name;
  }
}

}  // namespace
}  // namespace tessera::memory_pool_test
