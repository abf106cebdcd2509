// Checkpoints of runs that are killed at any moment, asked to stop, or lose a rank.
#include <signal.h>

#include <random>
#include <thread>

#include "cli/same_bits.h"
#include "cli/saving_run.h"
#include "proof.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

bool gone(const std::map<int, pid_t>& ranks) {
  return std::ranges::none_of(ranks, [](const auto& one) { return alive(one.second); });
}

constexpr int kSteps = 300;
constexpr int kInterval = 5;

/// A run that is killed again and again, within `span` of its start, and resumes where the last one
/// was stopped; one that reaches its end is compared with the undisturbed one, and the next one
/// begins again.
class KilledAgain {
 public:
  KilledAgain(const TemporaryFolder& undisturbed, milliseconds span, unsigned seed)
      : undisturbed_(undisturbed), span_(span), seed_(seed), random_(seed) {}

  void kill(int times) {
    for (int i = 0; i < times; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed_) + ", case " + std::to_string(i));
      ASSERT_NO_FATAL_FAILURE(kill_once(/*all=*/i % 3 != 2));
    }
    Process last(folder_.path(), two_ranks("run", kSteps, kInterval));
    ASSERT_EQ(last.wait(kLong), 0) << last.err();
    expect_end();
  }
  int with_checkpoint() const { return with_checkpoint_; }

 private:
  void kill_once(bool all) {
    const auto moment = milliseconds(random_() % static_cast<unsigned>(span_.count()));
    SCOPED_TRACE((all ? "all after " : "one rank after ") + std::to_string(moment.count()) + " ms");
    Process run(folder_.path(), two_ranks("run", kSteps, kInterval));
    const auto pids = run.wait_for_ranks(2);
    std::this_thread::sleep_for(moment);
    if (run.wait(milliseconds(0))) {
      ASSERT_EQ(run.wait(kLong), 0) << run.err();
      expect_end();
      return;
    }
    ::kill(all ? run.pid() : pids.at(static_cast<int>(random_() % 2)), SIGKILL);
    const int code = run.wait(kLong).value_or(-1);
    EXPECT_TRUE(code == 128 + SIGKILL || code == 0) << code;  // 0: it ended in this very moment
    ASSERT_TRUE(wait_until(kLong, [&] { return gone(pids); })) << "ranks die with their parent";
    const auto store = store_of(folder_, "run");
    if (const auto latest = store.latest()) {
      expect_same_bits(store, store_of(undisturbed_, "run"), *latest);
      ++with_checkpoint_;
    }
  }
  void expect_end() const {
    const auto store = store_of(folder_, "run");
    EXPECT_EQ(store.latest(), kSteps);
    expect_same_bits(store, store_of(undisturbed_, "run"), kSteps);
    EXPECT_EQ(losses(folder_ / "run"), losses(undisturbed_ / "run"));
    fs::remove_all(folder_ / "run");
  }

  const TemporaryFolder& undisturbed_;
  const SmallRun folder_;
  const milliseconds span_;
  unsigned seed_;
  std::mt19937 random_;
  int with_checkpoint_ = 0;
};

// 16 times everything is killed, 8 times one rank, from the start of the processes into the steps
// and the writing, however long that takes here. Two runs at a time: half of it is waiting.
TEST(KilledRun, ResumesWithTheBitsOfTheUndisturbedRun) {
  const int kills = test::full_proof() ? 300 : 12;  // of each
  const SmallRun folder;
  const auto begin = std::chrono::steady_clock::now();
  Process undisturbed(folder.path(), two_ranks("run", kSteps, kInterval));
  ASSERT_TRUE(wait_until(kLong, [&] { return store_of(folder, "run").latest().has_value(); }));
  const auto span =
      std::chrono::duration_cast<milliseconds>(2 * (std::chrono::steady_clock::now() - begin));
  ASSERT_EQ(undisturbed.wait(kLong), 0) << undisturbed.err();
  KilledAgain one(folder, span, 60);
  KilledAgain other(folder, span, 61);
  {
    const std::jthread second([&] { EXPECT_NO_THROW(other.kill(kills)); });
    EXPECT_NO_THROW(one.kill(kills));
  }
  EXPECT_GE(one.with_checkpoint() + other.with_checkpoint(), kills)
      << "most moments were in the steps";
}

TEST(AskedToStop, SavesTheStepAndResumesLaterWithTheSameBits) {
  const SmallRun folder;
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
  const SmallRun folder;
  std::filesystem::resize_file(folder.write("long.txt", ""), std::uintmax_t{1} << 36);  // holes
  Process first(folder.path(), two_ranks("run", 1, 100'000));  // a resumed one has none before
  ASSERT_EQ(first.wait(kLong), 0) << first.err();
  auto words = two_ranks("run", 100'000, 100'000);
  words.insert(words.end(), {"--validation.path", "long.txt", "--validation.interval", "3",
                             "--validation.steps", "-1"});
  Process run(folder.path(), words);
  ASSERT_TRUE(wait_until(kLong, [&] { return losses(folder / "run").size() >= 2; })) << run.err();
  ::kill(run.wait_for_ranks(2).at(1), SIGTERM);
  ASSERT_EQ(run.wait(kLong), 0) << run.err();
  const auto steps = static_cast<std::int64_t>(losses(folder / "run").size());
  EXPECT_THAT(store_of(folder, "run").steps(), ElementsAre(1, steps));
  EXPECT_THAT(read_file(folder / "run/metrics/metrics.jsonl"), Not(Says("val_loss")));
}

// Rank 0's disk never answers, so its writer never ends. Then its row of the validation has a token
// that the model does not know.
TEST(FailingRank, DoesNotWaitForItsWriterNorDoTheOthers) {
  constexpr int kSaved = 5;
  constexpr int kFails = kSaved + 3;
  const SmallRun folder;
  const std::string bad_token = "\xff\xff";
  std::string tokens;
  for (int i = 0; i < 17 * 4; ++i) tokens += i == 2 * 17 + 3 ? bad_token : std::string("a\0", 2);
  folder.write("rows.bin", tokens);
  folder.write("rows.json", R"({"dtype": "uint16", "num_tokens": 68, "vocab_size": 65536})");
  Process first(folder.path(), two_ranks("run", 1, 100'000));  // validated first, else
  ASSERT_EQ(first.wait(kLong), 0) << first.err();
  auto words = two_ranks("run", 100'000, kSaved);
  words.insert(words.end(), {"--validation.path", "rows.bin", "--validation.interval",
                             std::to_string(kFails), "--validation.steps", "1"});
  Process run(
      folder.path(), words,
      {{"LD_PRELOAD", TESSERA_STALLING_SYNC}, {"TESSERA_TEST_STALLED_FILE", "rank_0.safetensors"}});
  const auto pids = run.wait_for_ranks(2);
  EXPECT_EQ(run.wait(kLong), 1) << run.err();
  EXPECT_TRUE(fs::exists(folder / "stalled")) << "nothing held its writer up";
  EXPECT_EQ(losses(folder / "run").size(), kFails - 1U) << "the failing step is not reported";
  EXPECT_THAT(run.last_error_line(), Says("rank 0", "65535"));
  EXPECT_TRUE(wait_until(kLong, [&] { return gone(pids); }));
  EXPECT_THAT(store_of(folder, "run").steps(), ElementsAre(1)) << "the next was not complete";
}

// Rank 0's disk never answers either, before the first step: that is waited for longer than a
// collective of a step, and the end of it says what for.
TEST(StartUp, ThatRankZeroNeverEndsIsWaitedForAndNamedWithItsWork) {
  const SmallRun folder;
  auto words = two_ranks("run", 5, 5);
  words.insert(words.end(), {"--comm.timeout_seconds", "2", "--comm.init_timeout_seconds", "10"});
  Process run(folder.path(), words,
              {{"LD_PRELOAD", TESSERA_STALLING_SYNC}, {"TESSERA_TEST_STALLED_FILE", "run"}});
  const auto pids = run.wait_for_ranks(2);
  EXPECT_EQ(run.wait(kLong), 1) << run.err();
  EXPECT_TRUE(fs::exists(folder / "stalled")) << "nothing held rank 0 up";
  EXPECT_THAT(run.last_error_line(),
              Says("waited 10 s for rank 0", "rank 0 was busy with: writing config.toml"));
  EXPECT_TRUE(wait_until(kLong, [&] { return gone(pids); }));
}

// A stopped rank holds the step up for ever: the first signal waits for it, a second one does not.
TEST(AskedToStop, ASecondSignalEndsAtOnce) {
  const SmallRun folder;
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
