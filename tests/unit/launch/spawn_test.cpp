// Own spawn in a process that does not get the ends of its children by itself, as this program
// started again.
#include "launch/spawn.h"

#include <signal.h>
#include <unistd.h>

#include <thread>

#include "base/environment.h"
#include "launch/launch_environment.h"
#include "support/process.h"
#include "support/temporary_folder.h"

namespace tessera::comm::spawn_test {
namespace {

constexpr int kRanks = 3;
constexpr std::chrono::seconds kPatience{60};

/// Which takes the ends: none, what started the process, the process, another thread of it once the
/// ranks run.
const std::vector<std::string> kTakers{"none", "ignored", "no wait", "ignored later"};

std::string file_of(int rank) { return concat("rank_", rank); }

/// Says that it runs, and ends as it is told.
[[noreturn]] void be_rank(const std::string& rank) {
  std::ofstream("rank_" + rank).flush();
  wait_until(kPatience, [] { return std::filesystem::exists("go"); });
  ::_exit(std::stoi(rank) == 1 ? std::stoi(base::environment_variable("RANK_1_ENDS").value()) : 0);
}

void ignore_ends_later() {
  wait_until(kPatience, [] {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!std::filesystem::exists(file_of(rank))) return false;
    }
    return true;
  });
  ::signal(SIGCHLD, SIG_IGN);
  std::ofstream("go").flush();
}

// Started by the test below.
TEST(OwnSpawnProcess, DISABLED_Runs) {
  if (const auto rank = base::environment_variable(spawn_variable::kRank)) be_rank(*rank);
  const std::string taker = base::environment_variable("TAKER").value();
  struct sigaction ends{};
  ends.sa_handler = taker == "ignored" ? SIG_IGN : SIG_DFL;
  ends.sa_flags = taker == "no wait" ? SA_NOCLDWAIT : 0;
  ASSERT_EQ(::sigaction(SIGCHLD, &ends, nullptr), 0);
  if (taker == "ignored later") {
    std::thread(ignore_ends_later).detach();
  } else {
    std::ofstream("go").flush();
  }
  const int code = spawn_ranks(kRanks);
  struct sigaction after{};
  ::sigaction(SIGCHLD, nullptr, &after);
  const bool same = after.sa_handler == ends.sa_handler &&
                    (after.sa_flags & SA_NOCLDWAIT) == (ends.sa_flags & SA_NOCLDWAIT);
  ::_exit(same ? code : 99);
}

/// Property: own spawn ends with its ranks for every treatment of SIGCHLD: with their code, and
/// where that is lost with a failure that says so. Naive: it waits for ever, as waitpid() finds no
/// child.
TEST(OwnSpawn, EndsWithItsRanksForAnyWaiter) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  for (const std::string& taker : kTakers) {
    for (const int code : {0, 5}) {
      SCOPED_TRACE(concat(taker, ", ", code));
      const TemporaryFolder folder;
      Process process(folder.path(),
                      {self, "--gtest_also_run_disabled_tests", "--gtest_filter=OwnSpawnProcess.*"},
                      {{"TAKER", taker}, {"RANK_1_ENDS", std::to_string(code)}});
      const bool lost = taker == "ignored later";
      EXPECT_EQ(process.wait(kPatience), lost ? 1 : code) << process.err();
      if (lost) {
        EXPECT_THAT(process.err(), ::testing::HasSubstr("ended, found no exit code"));
      } else if (code != 0) {
        EXPECT_THAT(process.err(), ::testing::HasSubstr("rank 1: ended with exit code 5"));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm::spawn_test
