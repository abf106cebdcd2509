// Checkpoints under what happens to real runs: killed at any moment, asked to stop, a full disk, a
// folder that cannot be written.
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>
#include <thread>

#include "cli/process.h"
#include "cli/same_bits.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::TemporaryFolder;

constexpr auto kLong = std::chrono::minutes(2);

/// `limit` stands in front of the program.
Words two_ranks(const std::string& run, int steps, int interval, const Words& limit = {}) {
  Words words = limit;
  const Words program{TESSERA_PROGRAM,
                      "train",
                      "run.toml",
                      "--nproc",
                      "2",
                      "--job.dump_folder",
                      run,
                      "--training.steps",
                      std::to_string(steps),
                      "--checkpoint.interval",
                      std::to_string(interval),
                      "--metrics.log_freq",
                      "100000"};
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

bool gone(const std::map<int, pid_t>& ranks) {
  return std::ranges::none_of(ranks, [](const auto& one) { return alive(one.second); });
}

// 40 times everything is killed, 20 times one rank, from the start of the processes into the steps
// and the writing. A run goes on where the last one was stopped; one that reached its end is
// compared and begun anew.
TEST(KilledRun, GoesOnWithTheBitsOfTheUndisturbedRun) {
  constexpr int kSteps = 300;
  constexpr int kInterval = 5;
  const TemporaryFolder folder;
  write_small_run(folder);
  Process undisturbed(folder.path(), two_ranks("whole", kSteps, kInterval));
  ASSERT_EQ(undisturbed.wait(kLong), 0) << undisturbed.err();
  const auto whole = store_of(folder, "whole");
  const auto store = store_of(folder, "run");

  std::mt19937 random(60);
  int with_checkpoint = 0;
  const auto expect_end = [&] {
    EXPECT_EQ(store.latest(), kSteps);
    expect_same_bits(store, whole, kSteps);
    EXPECT_EQ(losses(folder / "run"), losses(folder / "whole"));
    fs::remove_all(folder / "run");
  };
  for (int i = 0; i < 60; ++i) {
    const bool all = i % 3 != 2;
    const auto moment = milliseconds(random() % 2000);
    SCOPED_TRACE("case " + std::to_string(i) + (all ? ", all" : ", one rank") + " after " +
                 std::to_string(moment.count()) + " ms");
    Process run(folder.path(), two_ranks("run", kSteps, kInterval));
    const auto pids = run.wait_for_ranks(2);
    std::this_thread::sleep_for(moment);
    if (run.wait(milliseconds(0))) {
      ASSERT_EQ(run.wait(kLong), 0) << run.err();
      expect_end();
      continue;
    }
    if (all) {
      ::kill(run.pid(), SIGKILL);
      const int code = run.wait(kLong).value_or(-1);
      EXPECT_TRUE(code == 128 + SIGKILL || code == 0) << code;  // 0: it ended in this very moment
    } else {
      ::kill(pids.at(static_cast<int>(random() % 2)), SIGKILL);
      const int code = run.wait(kLong).value_or(-1);
      EXPECT_TRUE(code == 128 + SIGKILL || code == 0) << code;  // 0: it was ending by itself
    }
    ASSERT_TRUE(wait_until(kLong, [&] { return gone(pids); })) << "ranks die with their parent";
    if (const auto latest = store.latest()) {
      expect_same_bits(store, whole, *latest);
      ++with_checkpoint;
    }
  }
  EXPECT_GE(with_checkpoint, 30) << "most moments were in the steps";
  Process last(folder.path(), two_ranks("run", kSteps, kInterval));
  ASSERT_EQ(last.wait(kLong), 0) << last.err();
  expect_end();
}

TEST(AskedToStop, SavesTheStepAndGoesOnLaterWithTheSameBits) {
  const TemporaryFolder folder;
  write_small_run(folder);
  struct Case {
    int signal;
    bool one_rank;
  };
  for (const Case one : {Case{SIGTERM, false}, Case{SIGINT, false}, Case{SIGTERM, true}}) {
    SCOPED_TRACE(one.signal);
    fs::remove_all(folder / "run");
    fs::remove_all(folder / "whole");
    Process run(folder.path(), two_ranks("run", 100'000, 100'000));
    ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= 5; })) << run.err();
    if (one.one_rank) {
      ::kill(run.wait_for_ranks(2).at(1), one.signal);
    } else {
      ::kill(run.pid(), one.signal);
    }
    ASSERT_EQ(run.wait(kLong), 0) << run.err();
    const auto steps = static_cast<int>(losses(folder / "run").size());
    EXPECT_THAT(store_of(folder, "run").steps(), ElementsAre(steps));

    for (const std::string name : {"run", "whole"}) {
      Process rest(folder.path(), two_ranks(name, steps + 3, 100'000));
      ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
    }
    expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), steps + 3);
    EXPECT_EQ(losses(folder / "run"), losses(folder / "whole"));
  }
}

// Its batches would take hours: the signal comes among them, or in a step before.
TEST(AskedToStop, DoesNotWaitForAValidation) {
  const TemporaryFolder folder;
  write_small_run(folder);
  auto words = two_ranks("run", 100'000, 100'000);
  words.insert(words.end(), {"--validation.path", "page.txt", "--validation.interval", "3",
                             "--validation.steps", "1000000000"});
  Process run(folder.path(), words);
  ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= 2; })) << run.err();
  ::kill(run.wait_for_ranks(2).at(1), SIGTERM);
  ASSERT_EQ(run.wait(kLong), 0) << run.err();
  const auto steps = static_cast<std::int64_t>(losses(folder / "run").size());
  EXPECT_THAT(store_of(folder, "run").steps(), ElementsAre(steps));
  EXPECT_THAT(read_file(folder / "run/metrics/metrics.jsonl"), Not(HasSubstr("val_loss")));
}

// What torchrun sets for its attempts at one job; no folder is named.
TEST(RestartedRun, GoesOnInTheFolderOfTheAttemptBefore) {
  const TemporaryFolder folder;
  write_small_run(folder);
  const auto attempt = [&](const std::string& run_id, int number, int steps) {
    const auto outcome =
        run_program(folder, {"train", "run.toml", "--training.steps", std::to_string(steps)},
                    "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 "
                    "TORCHELASTIC_RUN_ID=" +
                        run_id + " TORCHELASTIC_RESTART_COUNT=" + std::to_string(number));
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.err;
  };
  const auto runs = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder / "outputs")) {
      if (entry.path().filename() != ".restarts") names.push_back(entry.path().filename());
    }
    return names;
  };
  attempt("a", 0, 2);
  EXPECT_THAT(attempt("a", 1, 3), HasSubstr("resumed from"));
  ASSERT_EQ(runs().size(), 1U);
  EXPECT_EQ(losses(folder / "outputs" / runs().front()).size(), 3U);
  attempt("a", 0, 2);  // another job of that name
  attempt("b", 0, 2);
  EXPECT_EQ(runs().size(), 3U);
  EXPECT_THAT(attempt("c", 1, 2), HasSubstr("set job.dump_folder"));
}

// Else the next attempt would begin anew, hours later.
TEST(RestartedRun, IsRefusedWhereItsFolderCannotBeNoted) {
  const TemporaryFolder folder;
  write_small_run(folder);
  const auto first_attempt = [&] {
    return run_program(folder, {"train", "run.toml"},
                       "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 "
                       "TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=0");
  };
  ASSERT_EQ(first_attempt().code, 0);
  const fs::path note = fs::directory_iterator(folder / "outputs/.restarts")->path();
  fs::remove(note);
  fs::create_directory(note);
  const auto outcome = first_attempt();
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("outputs/.restarts/" + note.filename().string()));
}

// load_step is for the first attempt that comes so far; what another job left does not count.
TEST(RestartedRun, LoadStepIsForTheFirstAttempt) {
  const TemporaryFolder folder;
  write_small_run(folder);
  const auto attempt = [&](const std::string& job, int number, int load_step, int steps) {
    return run_program(folder,
                       {"train", "run.toml", "--job.dump_folder", "run", "--checkpoint.interval",
                        "1", "--training.steps", std::to_string(steps), "--checkpoint.load_step",
                        std::to_string(load_step)},
                       "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 "
                       "TORCHELASTIC_RUN_ID=" +
                           job + " TORCHELASTIC_RESTART_COUNT=" + std::to_string(number));
  };
  const auto expect_resumed = [&](const Outcome& outcome, const std::string& step) {
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("run/checkpoint/" + step + ", written by"));
  };
  EXPECT_EQ(attempt("a", 0, 0, 2).code, 0);
  expect_resumed(attempt("a", 1, 0, 4), "step-2");
  expect_resumed(attempt("a", 2, 0, 5), "step-4");
  // Attempt 0 of another job was refused: its restarts are too.
  for (const int number : {0, 1}) {
    const auto outcome = attempt("b", number, 0, 6);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("checkpoint.load_step: found 0 and "));
  }
  // Its first attempt never came so far: the second one still goes back.
  expect_resumed(attempt("c", 1, 2, 4), "step-2");
  expect_resumed(attempt("c", 2, 2, 6), "step-4");
  expect_resumed(attempt("c", 3, 3, 4), "step-3");
  expect_resumed(attempt("d", 1, 3, 4), "step-3");
  expect_resumed(attempt("d", 0, 3, 4), "step-3");
  expect_resumed(attempt("d", 1, 3, 5), "step-4");
}

// Rank 0's file is a pipe that nobody reads: its writer never ends. Then a step line finds no
// space.
TEST(FailingRank, DoesNotWaitForItsWriterNorDoTheOthers) {
  constexpr int kSaved = 200;
  const TemporaryFolder folder;
  write_small_run(folder);
  auto words = two_ranks("run", 100'000, kSaved, {"sh", "-c", "exec \"$0\" \"$@\" > /dev/full"});
  words.back() = std::to_string(kSaved + 5);  // metrics.log_freq
  Process run(folder.path(), words);
  ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= 2; })) << run.err();
  const auto pipe = store_of(folder, "run").temporary(kSaved) / "rank_0.safetensors";
  fs::create_directories(pipe.parent_path());
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_LT(losses(folder / "run").size(), kSaved) << "too late to hold its writer up";
  const auto pids = run.wait_for_ranks(2);
  ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= kSaved + 5; }));
  EXPECT_EQ(run.wait(std::chrono::seconds(10)), 1) << run.err();
  EXPECT_THAT(run.err(), HasSubstr("a step line cannot be written"));
  EXPECT_TRUE(wait_until(std::chrono::seconds(1), [&] { return gone(pids); }));
  EXPECT_TRUE(fs::is_fifo(pipe)) << "it was written to";
}

// A stopped rank holds the step up for ever: the first signal waits for it, a second one does not.
TEST(AskedToStop, ASecondSignalEndsAtOnce) {
  const TemporaryFolder folder;
  write_small_run(folder);
  Process run(folder.path(), two_ranks("run", 100'000, 100'000));
  ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= 3; })) << run.err();
  const auto pids = run.wait_for_ranks(2);
  ::kill(pids.at(1), SIGSTOP);
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait(milliseconds(500)), std::nullopt) << "the step is not finished";
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait(std::chrono::seconds(15)), 128 + SIGTERM);
  EXPECT_TRUE(wait_until(kLong, [&] { return gone(pids); }));
}

/// The file that an error line of a run names, the step before it intact, nothing half written; and
/// the same command without the obstacle goes on to the bits of the undisturbed run.
void expect_intact(const TemporaryFolder& folder, std::int64_t step) {
  const auto store = store_of(folder, "run");
  EXPECT_EQ(store.latest(), step);
  CheckpointFolder::open(store.complete(step)).verify_all();
  for (const auto& entry : fs::directory_iterator(store.folder())) {
    EXPECT_THAT(entry.path().filename(), Not(HasSubstr(".tmp")));
  }
}

TEST(FullDisk, AFileThatMayNotGrowIsNamedAndTheCheckpointBeforeStays) {
  const TemporaryFolder folder;
  write_small_run(folder);
  Process first(folder.path(), two_ranks("run", 4, 2));
  ASSERT_EQ(first.wait(kLong), 0) << first.err();
  Process full(folder.path(),
               two_ranks("run", 8, 2, {"prlimit", "--fsize=40000"}));  // a rank's file has 67 KB
  EXPECT_EQ(full.wait(kLong), 1);
  EXPECT_THAT(full.err(), AllOf(HasSubstr("checkpoint of step 6"), HasSubstr("rank_0.safetensors"),
                                HasSubstr("File too large")));
  expect_intact(folder, 4);
  for (const std::string name : {"run", "whole"}) {
    Process rest(folder.path(), two_ranks(name, 8, 2));
    ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
  }
  expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), 8);
}

// `tessera train RUN/config.toml` goes on with nothing else.
TEST(FullDisk, LeavesTheRunsConfigAsItWas) {
  const TemporaryFolder folder;
  write_small_run(folder);
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
  EXPECT_THAT(full.err(), AllOf(HasSubstr("run/config.toml"), HasSubstr("File too large")));
  EXPECT_EQ(read_file(config), before);
  for (const auto& entry : fs::directory_iterator(folder / "run")) {
    EXPECT_THAT(entry.path().filename(), Not(HasSubstr(".tmp")));
  }

  fs::create_hard_link(config, folder / "link");
  Process same(folder.path(), {TESSERA_PROGRAM, "train", "run/config.toml"});
  ASSERT_EQ(same.wait(kLong), 0) << same.err();
  EXPECT_TRUE(fs::equivalent(config, folder / "link")) << "nothing new, nothing written";
  Process longer(folder.path(),
                 {TESSERA_PROGRAM, "train", "run/config.toml", "--training.steps", "5"});
  ASSERT_EQ(longer.wait(kLong), 0) << longer.err();
  EXPECT_THAT(read_file(config), HasSubstr("steps = 5"));
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
  /// As a disk that became read-only is to whoever opens a file: the lock that a run holds open
  /// keeps the disk itself from it.
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
  const TemporaryFolder folder;
  write_small_run(folder);
  const SmallDisk disk(folder / "run/checkpoint");
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  Process full(folder.path(), two_ranks("run", 20, 2));  // 140 KB each: two fit
  EXPECT_EQ(full.wait(kLong), 1);
  EXPECT_THAT(full.err(), AllOf(HasSubstr("checkpoint of step 6"), HasSubstr("rank_"),
                                HasSubstr("No space left on device")));
  expect_intact(folder, 4);
  ASSERT_TRUE(disk.remount(0, "size=4m"));
  for (const std::string name : {"run", "whole"}) {
    Process rest(folder.path(), two_ranks(name, 20, 2));
    ASSERT_EQ(rest.wait(kLong), 0) << rest.err();
  }
  expect_same_bits(store_of(folder, "run"), store_of(folder, "whole"), 20);
}

TEST(ReadOnlyFolder, IsRefusedAtTheStartAndEndsARunWithTheCheckpointBeforeIntact) {
  const TemporaryFolder folder;
  write_small_run(folder);
  const SmallDisk disk(folder / "run/checkpoint");
  if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
  ASSERT_TRUE(disk.remount(0, "size=100m"));
  const auto store = store_of(folder, "run");
  Process run(folder.path(), two_ranks("run", 100'000, 5));
  ASSERT_TRUE(wait_until(kLong, [&] { return store.steps().size() >= 2; })) << run.err();
  // Refused as busy while a file is open for writing.
  ASSERT_TRUE(wait_until(kLong, [&] { return disk.cover_read_only(); }));
  EXPECT_EQ(run.wait(kLong), 1);
  EXPECT_THAT(run.err(), AllOf(HasSubstr("checkpoint of step "), HasSubstr("run/checkpoint/step-"),
                               HasSubstr("Read-only file system")));
  const auto latest = store.latest();
  ASSERT_TRUE(latest.has_value());
  CheckpointFolder::open(store.complete(*latest)).verify_all();

  Process refused(folder.path(), two_ranks("run", 100'000, 5));
  EXPECT_EQ(refused.wait(kLong), 2);
  EXPECT_THAT(refused.err(),
              AllOf(HasSubstr("run/checkpoint"), HasSubstr("Read-only file system")));
  ASSERT_TRUE(disk.uncover());
  Process rest(folder.path(), two_ranks("run", static_cast<int>(*latest) + 1, 5));
  EXPECT_EQ(rest.wait(kLong), 0) << rest.err();
}

}  // namespace
}  // namespace tessera::cli
