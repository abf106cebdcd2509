// A rank of a real training run is killed, throws or stalls at a random moment, from the start of
// the processes into the steps, which are eager, follow a plan or are replayed: every process is
// gone within 10 s of the event, or of the timeout, and own spawn prints the culprit's error last.
// Other launchers: launchers_test.cpp.
#include <signal.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "cli/program.h"
#include "proof.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::lost_rank_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;

constexpr int kRanks = 3;
constexpr int kCases = 10;  // scripts/full kills: twenty times as many
constexpr seconds kGone{10};
constexpr seconds kTimeout{3};       // of a collective
constexpr seconds kInitTimeout{10};  // of what comes before

/// The value of compile.mode; runs with plans choose again by what their first steps took.
std::string mode_of(int number) {
  const std::array<std::string, 3> modes{"off", "plan", "replay"};
  return modes.at(static_cast<std::size_t>(number) % modes.size());
}

Words endless_training(const std::string& mode = "off", int ranks = kRanks) {
  Words words{"train",
              "run.toml",
              "--training.steps",
              "1000000",
              "--training.global_batch_size",
              std::to_string(ranks),
              "--metrics.log_freq",
              "1000000",
              "--job.dump_folder",
              "run",
              "--comm.timeout_seconds",
              std::to_string(kTimeout.count()),
              "--comm.init_timeout_seconds",
              std::to_string(kInitTimeout.count())};
  if (mode != "off") {
    words.insert(words.end(), {"--compile.mode", mode, "--compile.memory_budget", "90%"});
  }
  return started_by(Starter::kOwnSpawn, ranks, words);
}

struct Case {
  int number = 0;
  int rank = 0;
  milliseconds moment{0};  ///< after the start of the processes
};

std::string to_string(const Case& one) {
  return "case " + std::to_string(one.number) + ", mode " + mode_of(one.number) + ": rank " +
         std::to_string(one.rank) + " after " + std::to_string(one.moment.count()) + " ms";
}

/// The same in every run of the test.
std::vector<Case> random_cases(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Case> cases;
  const int count = test::full_proof() ? 20 * kCases : kCases;
  for (int i = 0; i < count; ++i) {
    cases.push_back({i, static_cast<int>(random() % kRanks), milliseconds(random() % 3000)});
  }
  return cases;
}

/// Several runs at a time: most of a case is waiting.
template <class RunCase>
void run_side_by_side(const std::vector<Case>& cases, int at_a_time, RunCase run_case) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> workers;
  for (int worker = 0; worker < at_a_time; ++worker) {
    workers.emplace_back([&] {
      for (std::size_t i = next++; i < cases.size(); i = next++) {
        SCOPED_TRACE(to_string(cases[i]));
        const SmallRun folder;
        run_case(cases[i], folder);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

void expect_all_gone(const std::map<int, pid_t>& ranks) {
  for (const auto& [rank, pid] : ranks) EXPECT_FALSE(alive(pid)) << "rank " << rank;
}

std::string name_of_rank(const Case& one) { return "rank " + std::to_string(one.rank); }

TEST(LostRank, KilledAtARandomMomentIsNamedAndNoRankStays) {
  run_side_by_side(random_cases(20), 3, [](const Case& one, const TemporaryFolder& folder) {
    Process run(folder.path(), endless_training(mode_of(one.number)));
    const auto ranks = run.wait_for_ranks(kRanks);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks));
    std::this_thread::sleep_for(one.moment);
    kill(ranks.at(one.rank), SIGKILL);
    EXPECT_EQ(run.wait(kGone), 128 + SIGKILL) << run.err();
    EXPECT_EQ(run.last_error_line(), name_of_rank(one) + ": killed by signal 9 (SIGKILL)");
    expect_all_gone(ranks);
  });
}

TEST(LostRank, ThatThrowsAtARandomMomentIsNamedWithItsErrorAndNoRankStays) {
  run_side_by_side(random_cases(3), 3, [](const Case& one, const TemporaryFolder& folder) {
    const Variables failing{{"LD_PRELOAD", TESSERA_FAILING_ALLOCATOR},
                            {"TESSERA_TEST_FAIL_RANK", std::to_string(one.rank)},
                            {"TESSERA_TEST_FAIL_AFTER_MS", std::to_string(one.moment.count())}};
    Process run(folder.path(), endless_training(mode_of(one.number)), failing);
    const auto ranks = run.wait_for_ranks(kRanks);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks));
    ASSERT_TRUE(wait_until(seconds(120), [&] { return exists(folder / "failed"); })) << run.err();
    const auto code = run.wait(kGone);
    EXPECT_TRUE(code == 1 || code == 2)
        << run.err();  // 2: before the first step, on a busy machine
    EXPECT_THAT(run.last_error_line(),
                AllOf(Says(name_of_rank(one) + ": "), Says("can't allocate memory"),
                      Not(Says("Exception raised from"))))
        << run.err();
    expect_all_gone(ranks);
  });
}

// Naive: "killed by signal 7", and no word of the file.
TEST(LostRank, AFileThatIsCutShortWhileItIsReadIsNamed) {
  const SmallRun folder;
  Process run(folder.path(), endless_training());
  const auto ranks = run.wait_for_ranks(kRanks);
  ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks));
  ASSERT_TRUE(wait_until(seconds(120), [&] {
    return !read_so_far(folder / "run/metrics/metrics.jsonl").empty();
  })) << run.err();
  const auto size = std::filesystem::file_size(folder / "page.txt");
  std::filesystem::resize_file(folder / "page.txt", 0);
  EXPECT_EQ(run.wait(kGone), 1) << run.err();
  EXPECT_THAT(run.last_error_line(),
              AllOf(ContainsRegex("^rank [012]: '[^']*page.txt': became shorter while it was read"),
                    Says("(it was " + std::to_string(size) + " bytes when it was opened)")))
      << run.err();
  expect_all_gone(ranks);
}

TEST(LostRank, StalledAtARandomMomentIsNamedAndNoRankStaysAfterTheTimeout) {
  run_side_by_side(random_cases(7), 5, [](const Case& one, const TemporaryFolder& folder) {
    Process run(folder.path(), endless_training(mode_of(one.number)));
    const auto ranks = run.wait_for_ranks(kRanks);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks));
    std::this_thread::sleep_for(one.moment);
    std::error_code absent;
    const bool stepping =
        std::filesystem::file_size(folder / "run/metrics/metrics.jsonl", absent) > 0 && !absent;
    kill(ranks.at(one.rank), SIGSTOP);
    const seconds timeout = stepping ? kTimeout : kInitTimeout;
    EXPECT_EQ(run.wait(timeout + kGone), 1) << run.err();
    // A rank that noticed says for whom it waited; others may wait for those that do.
    EXPECT_THAT(run.last_error_line(), ContainsRegex("rank ([0-9], )*" + std::to_string(one.rank)))
        << run.err();
    expect_all_gone(ranks);
  });
}

// The profile of the first steps is written by one rank. After the run's last step the others have
// nothing more to wait for.
TEST(LostRank, ThatCannotWriteItsProfileIsNamedAndNoRankStays) {
  constexpr int kTwo = 2;
  for (const auto& [mode, steps] : {std::pair("plan", "5"), std::pair("replay", "1000000")}) {
    SCOPED_TRACE(std::string(mode) + ", " + steps + " steps");
    const SmallRun folder;
    const auto profile = folder / "run/metrics/profile.json";
    std::filesystem::create_directories(profile);
    auto words = endless_training(mode, kTwo);
    words.insert(words.end(), {"--training.steps", steps});
    Process run(folder.path(), words);
    const auto ranks = run.wait_for_ranks(kTwo);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kTwo));
    EXPECT_EQ(run.wait(seconds(60)), 1) << run.err();
    const std::string error = "rank 0: '" + profile.string() + "': found something that is no ";
    EXPECT_THAT(run.last_error_line(), StartsWith(error)) << run.err();
    EXPECT_THAT(run.err(), Says("rank 1: stopped because of " + error));
    expect_all_gone(ranks);
  }
}

// A write to a connection that a lost rank has closed raises SIGPIPE: a rank that died of it would
// be taken for the culprit.
TEST(LostRank, SigpipeEndsNoRank) {
  const SmallRun folder;
  Process run(folder.path(), endless_training());
  const auto ranks = run.wait_for_ranks(kRanks);
  ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks));
  const auto lines_of_metrics = [&] {
    const std::string text = read_so_far(folder / "run/metrics/metrics.jsonl");
    return std::count(text.begin(), text.end(), '\n');
  };
  ASSERT_TRUE(wait_until(seconds(120), [&] { return lines_of_metrics() > 0; })) << run.err();
  const auto before = lines_of_metrics();
  for (const auto& [rank, pid] : ranks) kill(pid, SIGPIPE);
  EXPECT_TRUE(wait_until(seconds(120), [&] { return lines_of_metrics() > before + 1; }))
      << run.err();
}

}  // namespace
}  // namespace tessera::cli::lost_rank_test
