// Checkpoints on a disk that is full, and in a folder that cannot be written.
#include <sched.h>
#include <sys/mount.h>

#include "cli/same_bits.h"
#include "cli/saving_run.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::full_disk_test {
namespace {

namespace fs = std::filesystem;

/// The file that an error line of a run names, the step before it intact, nothing half written; and
/// the same command without the obstacle resumes to the bits of the undisturbed run.
void expect_intact(const TemporaryFolder& folder, std::int64_t step) {
  const auto store = store_of(folder, "run");
  EXPECT_EQ(store.latest(), step);
  CheckpointFolder::open(store.complete(step)).verify_all();
  for (const auto& entry : fs::directory_iterator(store.folder())) {
    EXPECT_THAT(entry.path().filename(), Not(Says(".tmp")));
  }
}

TEST(FullDisk, AFileThatMayNotGrowIsNamedAndTheCheckpointBeforeStays) {
  const SmallRun folder;
  Process first(folder.path(), two_ranks("run", 4, 2));
  ASSERT_EQ(first.wait(kLong), 0) << first.err();
  Process full(folder.path(),
               two_ranks("run", 8, 2, {"prlimit", "--fsize=40000"}));  // a rank's file has 67 KB
  EXPECT_EQ(full.wait(kLong), 1);
  EXPECT_THAT(full.err(), Says("checkpoint of step 6", "rank_0.safetensors", "File too large"));
  expect_intact(folder, 4);
  for (const std::string name : {"run", "whole"}) {
    Process rest(folder.path(), two_ranks(name, 8, 2));
    ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
  }
  expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), 8);
}

// `tessera train RUN/config.toml` resumes with nothing else.
TEST(FullDisk, LeavesTheRunsConfigAsItWas) {
  const SmallRun folder;
  const Words train{TESSERA_PROGRAM, "train",
                    "run.toml",      "--job.dump_folder",
                    "run",           "--metrics.enable_tensorboard",
                    "false"};
  const auto with = [&](Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  Process first(folder.path(), train);
  ASSERT_EQ(first.wait(kLong), 0) << first.err();
  const fs::path config = folder / "run/config.toml";
  const std::string before = read_file(config);
  ASSERT_GT(before.size(), 1000U);
  fs::remove_all(folder / "run/logs");

  Process full(folder.path(),
               with({"prlimit", "--fsize=1000"}, with(train, {"--training.steps", "5"})));
  EXPECT_EQ(full.wait(kLong), 2);
  EXPECT_THAT(full.err(), Says("run/config.toml", "File too large"));
  EXPECT_EQ(read_file(config), before);
  for (const auto& entry : fs::directory_iterator(folder / "run")) {
    EXPECT_THAT(entry.path().filename(), Not(Says(".tmp")));
  }

  fs::create_hard_link(config, folder / "link");
  Process same(folder.path(), {TESSERA_PROGRAM, "train", "run/config.toml"});
  ASSERT_EQ(same.wait(kLong), 0) << same.err();
  EXPECT_TRUE(fs::equivalent(config, folder / "link")) << "nothing new, nothing written";
  Process longer(folder.path(),
                 {TESSERA_PROGRAM, "train", "run/config.toml", "--training.steps", "5"});
  ASSERT_EQ(longer.wait(kLong), 0) << longer.err();
  EXPECT_THAT(read_file(config), Says("steps = 5"));
}

// Naive: the signal ends the program without a message, and half a folder stays.
TEST(FullDisk, AFileThatMayNotGrowIsNamedByTheOtherVerbsToo) {
  const SmallRun folder;
  Process run(folder.path(), two_ranks("run", 2, 2));
  ASSERT_EQ(run.wait(kLong), 0) << run.err();
  Process full(folder.path(),
               {"prlimit", "--fsize=4000", TESSERA_PROGRAM, "convert", "run", "out"});
  EXPECT_EQ(full.wait(kLong), 1);
  EXPECT_THAT(full.err(), Says("model.safetensors", "File too large"));
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_THAT(entry.path().filename(), Not(StartsWith("out")));
  }
}

/// A small disk of memory in place of a run's checkpoint folder, seen by this process and its
/// children only.
class SmallDisk {
 public:
  explicit SmallDisk(fs::path folder) : folder_(std::move(folder)) {
    fs::create_directories(folder_);
    mounted_ = ::unshare(CLONE_NEWNS) == 0 &&
               ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               ::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=400k") == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool mounted() const { return mounted_; }
  /// Makes the disk read-only for every open of a file: the lock that a run holds open keeps the
  /// disk itself from it.
  bool cover_read_only() const {
    if (::mount(folder_.c_str(), folder_.c_str(), nullptr, MS_BIND, nullptr) != 0) return false;
    constexpr unsigned long kFlags = MS_BIND | MS_REMOUNT | MS_RDONLY;
    if (::mount("none", folder_.c_str(), nullptr, kFlags, nullptr) == 0) return true;
    uncover();
    return false;
  }
  bool uncover() const { return ::umount2(folder_.c_str(), MNT_DETACH) == 0; }
  bool remount(unsigned long flags, const char* options) const {
    return ::mount("tmpfs", folder_.c_str(), "tmpfs", MS_REMOUNT | flags, options) == 0;
  }

 private:
  fs::path folder_;
  bool mounted_ = false;
};

TEST(FullDisk, IsNamedAndTheCheckpointBeforeStays) {
  const SmallRun folder;
  const SmallDisk disk(folder / "run/checkpoint");
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  Process full(folder.path(), two_ranks("run", 20, 2));  // 140 KB each: two fit
  EXPECT_EQ(full.wait(kLong), 1);
  EXPECT_THAT(full.err(), Says("checkpoint of step 6", "run/checkpoint/step-6.tmp/",
                               "No space left on device"));
  expect_intact(folder, 4);
  ASSERT_TRUE(disk.remount(0, "size=4m"));
  for (const std::string name : {"run", "whole"}) {
    Process rest(folder.path(), two_ranks(name, 20, 2));
    ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
  }
  expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), 20);
}

TEST(ReadOnlyFolder, IsRefusedAtTheStartAndEndsARunWithTheCheckpointBeforeIntact) {
  const SmallRun folder;
  const SmallDisk disk(folder / "run/checkpoint");
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  ASSERT_TRUE(disk.remount(0, "size=100m"));
  const auto store = store_of(folder, "run");
  Process run(folder.path(), two_ranks("run", 100'000, 5));
  ASSERT_TRUE(wait_until(kLong, [&] { return store.steps().size() >= 2; })) << run.err();
  // Refused as busy while a file is open for writing.
  ASSERT_TRUE(wait_until(kLong, [&] { return disk.cover_read_only(); }));
  EXPECT_EQ(run.wait(kLong), 1);
  EXPECT_THAT(run.err(),
              Says("checkpoint of step ", "run/checkpoint/step-", "Read-only file system"));
  const auto latest = store.latest();
  ASSERT_TRUE(latest.has_value());
  CheckpointFolder::open(store.complete(*latest)).verify_all();

  Process refused(folder.path(), two_ranks("run", 100'000, 5));
  EXPECT_EQ(refused.wait(kLong), 2);
  EXPECT_THAT(refused.err(), Says("run/checkpoint", "Read-only file system"));
  ASSERT_TRUE(disk.uncover());
  Process rest(folder.path(), two_ranks("run", static_cast<int>(*latest) + 1, 5));
  EXPECT_EQ(rest.wait(kLong), 0) << rest.err();
}

}  // namespace
}  // namespace tessera::cli::full_disk_test
