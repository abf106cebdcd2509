// A rank of a real training run is killed or stopped at a random moment: every process is gone
// within 10 s of the event, or of the collective's timeout, and own spawn names the culprit last.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <sstream>
#include <thread>

#include "cli/program.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr auto kGone = std::chrono::seconds(10);

/// `tessera train` with own spawn, running until something ends it.
class EndlessRun {
 public:
  explicit EndlessRun(const testing::TemporaryFolder& folder) : folder_(folder) {
    pid_ = fork();
    if (pid_ != 0) return;
    const auto to = [](const std::filesystem::path& path, int fd) {
      dup2(open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600), fd);
    };
    to(folder / "stdout.txt", STDOUT_FILENO);
    to(folder / "stderr.txt", STDERR_FILENO);
    if (chdir(folder.path().c_str()) != 0) _exit(99);
    setenv("OMP_NUM_THREADS", "1", 1);
    for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
      unsetenv(name);
    }
    execl(TESSERA_PROGRAM, TESSERA_PROGRAM, "train", "run.toml", "--nproc", "3", "--training.steps",
          "100000", "--training.global_batch_size", "3", "--comm.timeout_seconds", "3",
          "--metrics.log_freq", "100000", static_cast<char*>(nullptr));
    _exit(99);
  }
  ~EndlessRun() {
    if (pid_ > 0 && !ended_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  /// The processes of the ranks, in the order in which they were started; waits until all are
  /// there.
  std::vector<pid_t> rank_pids() const {
    const auto file =
        "/proc/" + std::to_string(pid_) + "/task/" + std::to_string(pid_) + "/children";
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    std::vector<pid_t> pids;
    while (pids.size() < kRanks && Clock::now() < deadline) {
      pids.clear();
      std::istringstream text(read_file(file));
      for (pid_t pid = 0; text >> pid;) pids.push_back(pid);
      std::this_thread::sleep_for(milliseconds(5));
    }
    return pids;
  }

  /// Exit code, or -1 if it is still there after `limit`.
  int wait(std::chrono::milliseconds limit) {
    const auto deadline = Clock::now() + limit;
    int status = 0;
    while (Clock::now() < deadline) {
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    return -1;
  }

  std::string last_error_line() const {
    std::istringstream text(read_file(folder_ / "stderr.txt"));
    std::string last;
    for (std::string line; std::getline(text, line);) {
      if (!line.empty()) last = line;
    }
    return last;
  }

 private:
  const testing::TemporaryFolder& folder_;
  pid_t pid_ = -1;
  bool ended_ = false;
};

bool alive(pid_t pid) { return kill(pid, 0) == 0; }

void expect_all_gone(const std::vector<pid_t>& pids) {
  for (const auto pid : pids) EXPECT_FALSE(alive(pid)) << "process " << pid;
}

TEST(LostRank, KilledAtTwentyRandomMomentsIsNamedAndNobodyStays) {
  const testing::TemporaryFolder folder;
  write_small_run(folder);
  std::mt19937 random(20);
  for (int i = 0; i < 20; ++i) {
    EndlessRun run(folder);
    const auto pids = run.rank_pids();
    ASSERT_EQ(pids.size(), static_cast<std::size_t>(kRanks));
    const auto rank = random() % kRanks;
    const auto moment =
        milliseconds(random() % 2500);  // from the start of the processes into the steps
    SCOPED_TRACE("case " + std::to_string(i) + ": rank " + std::to_string(rank) + " after " +
                 std::to_string(moment.count()) + " ms");
    std::this_thread::sleep_for(moment);
    kill(pids[rank], SIGKILL);
    EXPECT_EQ(run.wait(kGone), 128 + SIGKILL);
    EXPECT_THAT(run.last_error_line(),
                HasSubstr("rank " + std::to_string(rank) + ": killed by signal 9 (SIGKILL)"));
    expect_all_gone(pids);
  }
}

TEST(LostRank, StalledAtRandomMomentsEndsTheRunAfterTheTimeout) {
  const testing::TemporaryFolder folder;
  write_small_run(folder);
  std::mt19937 random(7);
  for (int i = 0; i < 5; ++i) {
    EndlessRun run(folder);
    const auto pids = run.rank_pids();
    ASSERT_EQ(pids.size(), static_cast<std::size_t>(kRanks));
    const auto rank = random() % kRanks;
    const auto moment = milliseconds(2000 + random() % 1500);
    SCOPED_TRACE("case " + std::to_string(i) + ": rank " + std::to_string(rank) + " after " +
                 std::to_string(moment.count()) + " ms");
    std::this_thread::sleep_for(moment);
    kill(pids[rank], SIGSTOP);
    const int code = run.wait(std::chrono::seconds(3) + kGone);
    EXPECT_NE(code, -1) << "still running 10 s after the timeout";
    EXPECT_NE(code, 0);
    EXPECT_THAT(run.last_error_line(), HasSubstr("rank "));
    expect_all_gone(pids);
  }
}

}  // namespace
}  // namespace tessera::cli
