// Checkpoints of runs that are killed at any moment, asked to stop, or lose a rank.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>
#include <thread>

#include "cli/process.h"
#include "cli/same_bits.h"
#include "cli/saving_run.h"
#include "proof.h"

namespace tessera::cli::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryFolder;

bool gone(const std::map<int, pid_t>& ranks) {
  return std::ranges::none_of(ranks, [](const auto& one) { return alive(one.second); });
}

// 40 times everything is killed, 20 times one rank, from the start of the processes into the steps
// and the writing. A run goes on where the last one was stopped; one that reached its end is
// compared and begun anew.
TEST(KilledRun, GoesOnWithTheBitsOfTheUndisturbedRun) {
  constexpr int kSteps = 300;
  constexpr int kInterval = 5;
  const int kills = test::full_proof() ? 600 : 60;
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
  for (int i = 0; i < kills; ++i) {
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
  EXPECT_GE(with_checkpoint, kills / 2) << "most moments were in the steps";
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

}  // namespace
}  // namespace tessera::cli::checkpoint_test
