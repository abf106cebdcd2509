// [Note: failure]: whatever a rank does, all processes are gone in time and the culprit is named
// last.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <string>
#include <vector>

#include "base/environment.h"

namespace tessera::process_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
  double seconds = 0;

  std::string last_error_line() const {
    const auto end = err.find_last_not_of('\n');
    if (end == std::string::npos) return {};
    const auto begin = err.rfind('\n', end);
    return err.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
  }
};

/// A program and what it has printed; the pipes reach end of file only when all its processes are
/// gone.
class Program {
 public:
  Program(std::vector<std::string> arguments, tessera::base::Environment variables)
      : start_(std::chrono::steady_clock::now()) {
    int out[2];
    int err[2];
    if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) std::abort();
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    std::vector<char*> argument_pointers;
    for (auto& one : arguments) argument_pointers.push_back(one.data());
    argument_pointers.push_back(nullptr);
    std::vector<std::string> lines;
    for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
    std::vector<char*> variable_pointers;
    for (auto& one : lines) variable_pointers.push_back(one.data());
    variable_pointers.push_back(nullptr);
    if (::posix_spawn(&pid_, arguments[0].c_str(), &actions, nullptr, argument_pointers.data(),
                      variable_pointers.data()) != 0) {
      std::abort();
    }
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    ::close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }

  Outcome wait() {
    Outcome outcome;
    pollfd events[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
    std::string* texts[2] = {&outcome.out, &outcome.err};
    int open = 2;
    while (open > 0) {
      ::poll(events, 2, -1);
      for (int i = 0; i < 2; ++i) {
        if (events[i].fd < 0 || events[i].revents == 0) continue;
        char buffer[4096];
        const auto got = ::read(events[i].fd, buffer, sizeof(buffer));
        if (got > 0) {
          texts[i]->append(buffer, static_cast<std::size_t>(got));
        } else {
          ::close(events[i].fd);
          events[i].fd = -1;
          --open;
        }
      }
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return outcome;
  }

 private:
  std::chrono::steady_clock::time_point start_;
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
};

struct Plan {
  int nproc = 2;
  std::string mode = "none";
  int rank = 0;
  int step = 0;
  int steps = 30;
  int timeout_ms = 100000;
};

std::vector<std::string> arguments(const Plan& plan) {
  return {TESSERA_SPAWNED_RANK,           std::to_string(plan.nproc), plan.mode,
          std::to_string(plan.rank),      std::to_string(plan.step),  std::to_string(plan.steps),
          std::to_string(plan.timeout_ms)};
}

Outcome run(const Plan& plan) {
  return Program(arguments(plan), tessera::base::environment()).wait();
}

// Starting two ranks takes a few seconds on a busy machine; the rest is the promise of 10 s.
constexpr double kSeconds = 25;

TEST(OwnSpawn, AllRanksFinish) {
  for (const int nproc : {1, 2, 3}) {
    const auto outcome = run({.nproc = nproc});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    for (int rank = 0; rank < nproc; ++rank) {
      EXPECT_THAT(outcome.out, HasSubstr("done " + std::to_string(rank)));
    }
  }
}

TEST(OwnSpawn, ZeroRanksAreRefused) {
  const auto outcome = run({.nproc = 0});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("--nproc: found 0"));
}

// All ranks watch each other once they have met, whatever groups a program opens.
TEST(OwnSpawn, ARankThatSharesNoGroupWithTheOthersIsMissedWhileTheyWait) {
  const auto outcome = run({.nproc = 3, .mode = "apart", .rank = 1});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(), HasSubstr("rank 1 has given no sign of life"))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

class AnyRank : public testing::TestWithParam<int> {
 protected:
  std::string name() const { return "rank " + std::to_string(GetParam()) + ": "; }
  /// The same moments in every run of the test.
  std::vector<int> moments(int count) const {
    std::mt19937 random(static_cast<unsigned>(17 + GetParam()));
    std::vector<int> steps;
    for (int i = 0; i < count; ++i) steps.push_back(static_cast<int>(random() % 30));
    return steps;
  }
};

TEST_P(AnyRank, ThatThrowsIsNamedWithItsError) {
  for (const int step : moments(3)) {
    const auto outcome = run({.mode = "throw", .rank = GetParam(), .step = step});
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_EQ(outcome.last_error_line(), name() + "rank fails on purpose");
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

// Naive: a rank leaves by _exit, and what it has printed into a pipe is still in its buffer.
TEST_P(AnyRank, ThatThrowsLosesNothingOfWhatWasPrintedBefore) {
  for (const char* mode : {"throw", "usage"}) {
    const auto outcome = run({.mode = mode, .rank = GetParam(), .step = 3});
    EXPECT_EQ(outcome.exit_code, std::string(mode) == "usage" ? 2 : 1);
    for (const int rank : {0, 1}) {
      EXPECT_THAT(outcome.out, HasSubstr("begun " + std::to_string(rank) + "\n")) << mode;
    }
  }
}

TEST_P(AnyRank, ThatIsKilledIsNamedWithItsSignal) {
  for (const int step : moments(3)) {
    const auto outcome = run({.nproc = 3, .mode = "kill", .rank = GetParam(), .step = step});
    EXPECT_EQ(outcome.exit_code, 137);
    EXPECT_EQ(outcome.last_error_line(), name() + "killed by signal 9 (SIGKILL)");
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

TEST_P(AnyRank, ThatStallsIsNamedAfterTheTimeout) {
  for (const char* mode : {"stall", "stop"}) {
    const auto outcome =
        run({.mode = mode, .rank = GetParam(), .step = moments(1)[0], .timeout_ms = 1000});
    EXPECT_EQ(outcome.exit_code, 1) << mode;
    EXPECT_THAT(outcome.last_error_line(),
                AllOf(StartsWith("rank " + std::to_string(1 - GetParam()) + ": "),
                      HasSubstr("waited 1 s for rank " + std::to_string(GetParam()))))
        << mode << "\n"
        << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds + 1);
  }
}

// Most ranks wait for one that waits itself, since control messages are relayed.
TEST_P(AnyRank, ThatStallsIsNamedByAllOfMany) {
  const auto outcome =
      run({.nproc = 6, .mode = "stall", .rank = GetParam(), .step = 4, .timeout_ms = 4000});
  EXPECT_EQ(outcome.exit_code, 1);
  const std::string waited = "waited 4 s for rank ";
  EXPECT_THAT(outcome.last_error_line(), HasSubstr(waited + std::to_string(GetParam()) + ";"))
      << outcome.err;
  for (auto at = outcome.err.find(waited); at != std::string::npos;
       at = outcome.err.find(waited, at + 1)) {
    EXPECT_EQ(outcome.err.substr(at + waited.size(), 2), std::to_string(GetParam()) + ";")
        << outcome.err;
  }
  EXPECT_LT(outcome.seconds, kSeconds + 4);
}

TEST_P(AnyRank, ThatWaitsInAnotherGroupIsNamedBesideWhoWaitsForIt) {
  const auto outcome = run({.mode = "cross", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("ranks wait for each other: rank 0 waits in"),
                    HasSubstr("has not issued; rank 1 waits in")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

// Whose wait ends first closes its connections: that must not make a culprit of it.
TEST_P(AnyRank, ThatStallsIsNamedByWhoWaitsForItAndNotByWhoWaitsForThose) {
  const auto outcome =
      run({.nproc = 3, .mode = "withhold", .rank = GetParam(), .step = 2, .timeout_ms = 1000});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              HasSubstr("waited 1 s for rank " + std::to_string(GetParam()) + ";"))
      << outcome.err;
  EXPECT_THAT(outcome.err, testing::Not(HasSubstr("lost rank")));
  EXPECT_LT(outcome.seconds, kSeconds + 1);
}

TEST_P(AnyRank, ThatExitsWithoutAWordIsNamedWithItsCode) {
  const auto outcome = run({.mode = "exit", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_EQ(outcome.last_error_line(), name() + "ended with exit code 7");
}

TEST_P(AnyRank, ThatDisagreesIsNamedBesideAnother) {
  const auto outcome = run({.mode = "disagree", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("ranks disagree: rank 0 issues"), HasSubstr("but rank 1 issues")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

TEST_P(AnyRank, ThatAbortsItsWorldCanRecoverWithTheOthers) {
  const auto outcome = run({.mode = "abort", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Others learn that it failed before its exception has come through its stack, and may be gone by
// then: what counts is the exception.
TEST_P(AnyRank, WhoseErrorTakesLongerThanWordOfItIsNamedWithTheError) {
  const auto outcome = run({.mode = "unwind", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_error_line(), name() + "rank fails on purpose") << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

TEST_P(AnyRank, ErrorsOfUseKeepTheirExitCode) {
  const auto outcome = run({.mode = "usage", .rank = GetParam(), .step = 0});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.last_error_line(), name() + "rank asks for the impossible");
}

TEST_P(AnyRank, ThatWorksLongerBeforeTheFirstStepIsWaitedFor) {
  const auto outcome =
      run({.nproc = 3, .mode = "work-slow", .rank = GetParam(), .timeout_ms = 3000});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Step 0: the others still wait for a group to open; 1: in one that is open.
TEST_P(AnyRank, ThatWorksTooLongBeforeTheFirstStepIsNamedWithItsWork) {
  const auto outcome = run({.nproc = 3,
                            .mode = "work-endless",
                            .rank = GetParam(),
                            .step = GetParam(),
                            .timeout_ms = 3000});
  const std::string rank = "rank " + std::to_string(GetParam());
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("10 s"), HasSubstr(rank + " was busy with: hashing the data")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds + 10);
}

// Far below the 60 s for which its work would be waited for.
TEST_P(AnyRank, ThatIsLostBeforeTheFirstStepIsNoticedInSeconds) {
  for (const int step : {0, 1}) {
    const auto killed = run({.nproc = 3, .mode = "work-kill", .rank = GetParam(), .step = step});
    EXPECT_EQ(killed.exit_code, 137);
    EXPECT_EQ(killed.last_error_line(), name() + "killed by signal 9 (SIGKILL)");
    EXPECT_LT(killed.seconds, kSeconds);
    const auto stopped = run(
        {.nproc = 3, .mode = "work-stop", .rank = GetParam(), .step = step, .timeout_ms = 3000});
    EXPECT_EQ(stopped.exit_code, 1);
    EXPECT_THAT(stopped.last_error_line(), HasSubstr("rank " + std::to_string(GetParam())))
        << stopped.err;
    EXPECT_LT(stopped.seconds, kSeconds);
  }
}

// Messages between stages among processes: who fails while another one waits for its message.
TEST(Messages, ReachTheirReceives) {
  for (const int nproc : {2, 4}) {
    const auto outcome = run({.nproc = nproc, .mode = "mail-none", .steps = 60});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("done " + std::to_string(nproc - 1)));
  }
}

TEST_P(AnyRank, ThatIsKilledBetweenMessagesIsNamedWithItsSignal) {
  for (const int step : moments(3)) {
    const auto outcome = run({.nproc = 3, .mode = "mail-kill", .rank = GetParam(), .step = step});
    EXPECT_EQ(outcome.exit_code, 137);
    EXPECT_EQ(outcome.last_error_line(), name() + "killed by signal 9 (SIGKILL)") << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

TEST_P(AnyRank, ThatThrowsBetweenMessagesIsNamedWithItsError) {
  const auto outcome = run({.nproc = 3, .mode = "mail-throw", .rank = GetParam(), .step = 5});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.last_error_line(), name() + "rank fails on purpose") << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

TEST_P(AnyRank, ThatStallsBetweenMessagesIsNamedWithTheMessageThatIsWaitedFor) {
  for (const char* mode : {"mail-stall", "mail-stop"}) {
    const auto outcome = run({.mode = mode, .rank = GetParam(), .step = 4, .timeout_ms = 1000});
    EXPECT_EQ(outcome.exit_code, 1) << mode;
    const std::string other = std::to_string(1 - GetParam());
    // The first stage waits for gradients, the second one for activations.
    EXPECT_THAT(outcome.last_error_line(),
                AllOf(StartsWith("rank " + other + ": "),
                      HasSubstr(GetParam() == 0 ? "activations of stage 0, micro-batch 0, step 4"
                                                : "gradients of stage 1, micro-batch 0, step 4"),
                      HasSubstr("waited 1 s for rank " + std::to_string(GetParam()))))
        << mode << "\n"
        << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds + 1);
  }
}

// Stages further away wait for one that waits itself.
TEST_P(AnyRank, ThatStallsBetweenMessagesIsNamedByAllStages) {
  const auto outcome =
      run({.nproc = 4, .mode = "mail-stall", .rank = GetParam(), .step = 4, .timeout_ms = 4000});
  EXPECT_EQ(outcome.exit_code, 1);
  const std::string waited = "waited 4 s for rank ";
  EXPECT_THAT(outcome.last_error_line(), HasSubstr(waited + std::to_string(GetParam()) + ";"))
      << outcome.err;
  for (auto at = outcome.err.find(waited); at != std::string::npos;
       at = outcome.err.find(waited, at + 1)) {
    EXPECT_EQ(outcome.err.substr(at + waited.size(), 2), std::to_string(GetParam()) + ";")
        << outcome.err;
  }
  EXPECT_LT(outcome.seconds, kSeconds + 4);
}

TEST_P(AnyRank, ThatAbortsBetweenMessagesCanRecoverWithTheOthers) {
  const auto outcome = run({.nproc = 3, .mode = "mail-poison", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST_P(AnyRank, WhoseMessageIsOfAnotherShapeIsNamedBesideTheOtherEnd) {
  const auto outcome = run({.mode = "mail-shape", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("ranks disagree: rank 0 issues "), HasSubstr("[2, 15000] Long"),
                    HasSubstr("[30000] Long"), HasSubstr("micro-batch 0, step 3")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

TEST_P(AnyRank, WhoseMessagesAreSwappedIsNamedBesideTheOtherEnd) {
  const auto outcome = run({.mode = "mail-swap", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("ranks wait for each other: rank 0 waits in "),
                    HasSubstr("micro-batch 0, step 3"), HasSubstr("has not issued; rank 1 waits")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

// [Note: disagreements]. Naive: the first watch that finds one ends its process, and so the run.
TEST(Disagreements, CanBeCaughtOnEveryRankAndTheRunGoesOn) {
  const int seeds[] = {0, 0, 1, 2, 3};  // by the number of ranks
  for (const int nproc : {2, 3, 4}) {
    const auto outcome = run({.nproc = nproc, .mode = "caught", .step = seeds[nproc], .steps = 6});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    for (int rank = 0; rank < nproc; ++rank) {
      EXPECT_THAT(outcome.out, HasSubstr("done " + std::to_string(rank))) << outcome.err;
    }
  }
}

// Naive: the store ends with rank 0, and a rank that leaves a little later is ended for that.
TEST(Disagreements, ThatAreCaughtEndNobodyWhoLeavesThen) {
  const auto outcome = run({.nproc = 3, .mode = "caught-leave"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Rank 2 shares no group with those that disagree: they recover, and would wait for it forever.
TEST(Disagreements, EndARankThatComesToNoCallOfTheLibrary) {
  const auto outcome = run({.nproc = 4, .mode = "apart-uncaught", .rank = 2});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(), AllOf(StartsWith("rank 2: ranks disagree: rank 0 issues"),
                                               HasSubstr("this rank made no call of the library")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

// Users' collectives among processes: their values, and what ranks that call other things are told.
TEST(UserCalls, HaveTheirValues) {
  for (const int nproc : {1, 2, 3}) {
    const auto outcome = run({.nproc = nproc, .mode = "user-none"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
}

TEST(UserCalls, ThatDifferAreNamedBesideEachOther) {
  const std::pair<const char*, const char*> differences[] = {
      {"operation", "broadcast of loss"},
      {"shape", "sum of [3, 2]"},
      {"dtype", "24 B Int"},
      {"order", "barrier of end"},
  };
  for (const auto& [mode, called] : differences) {
    const auto outcome = run({.nproc = 3, .mode = std::string("user-") + mode, .rank = 1});
    EXPECT_EQ(outcome.exit_code, 1) << mode;
    EXPECT_THAT(outcome.last_error_line(),
                AllOf(HasSubstr("ranks disagree"), HasSubstr(called),
                      HasSubstr("all_reduce of loss"), HasSubstr("sum of [2, 3]")))
        << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

TEST(UserCalls, ThatOneRankLeavesOutNameIt) {
  const auto outcome = run({.nproc = 3, .mode = "user-absent", .rank = 1, .timeout_ms = 4000});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              AllOf(HasSubstr("all_reduce of loss"), HasSubstr("waited 4 s for rank 1")))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds + 4);
}

TEST(UserCalls, ThatAreRefusedOnOneRankEndTheOthersWithItsError) {
  const auto outcome = run({.nproc = 3, .mode = "user-refused", .rank = 1});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.last_error_line(),
              StartsWith("rank 1: all_reduce of loss: found sizes [3, 2]"))
      << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

INSTANTIATE_TEST_SUITE_P(Process, AnyRank, testing::Values(0, 1),
                         [](const auto& one) { return "Rank" + std::to_string(one.param); });

TEST(OwnSpawn, SignalsArePassedOn) {
  Program program(arguments({.mode = "none", .steps = 1000000}), tessera::base::environment());
  // Wait until it is up: the parent has children once it can be told to stop.
  while (true) {
    const std::string path = "/proc/" + std::to_string(program.pid()) + "/task/" +
                             std::to_string(program.pid()) + "/children";
    const int fd = ::open(path.c_str(), O_RDONLY);
    char buffer[64];
    const auto got = fd >= 0 ? ::read(fd, buffer, sizeof(buffer)) : 0;
    if (fd >= 0) ::close(fd);
    if (got > 0 || fd < 0) break;
    ::sched_yield();
  }
  ::kill(program.pid(), SIGTERM);
  const auto outcome = program.wait();
  EXPECT_EQ(outcome.exit_code, 143) << outcome.err;
  EXPECT_LT(outcome.seconds, kSeconds);
}

TEST(OtherLaunchers, RanksOfAnEnvironmentMeetAndNameALostOne) {
  // As mpirun and torchrun start them: no parent of ours, the store at a port that both know.
  for (const std::string mode : {"none", "kill", "throw", "mail-kill"}) {
    auto variables = tessera::base::environment();
    variables["WORLD_SIZE"] = "2";
    variables["LOCAL_WORLD_SIZE"] = "2";
    variables["MASTER_ADDR"] = "127.0.0.1";
    variables["MASTER_PORT"] =
        std::to_string(20000 + ::getpid() % 9000 + static_cast<int>(mode.size()));
    std::vector<std::unique_ptr<Program>> ranks;
    for (const char* rank : {"0", "1"}) {
      variables["RANK"] = variables["LOCAL_RANK"] = rank;
      ranks.push_back(
          std::make_unique<Program>(arguments({.mode = mode, .rank = 1, .step = 5}), variables));
    }
    const auto survivor = ranks[0]->wait();
    const auto culprit = ranks[1]->wait();
    if (mode == "none") {
      EXPECT_EQ(survivor.exit_code, 0) << survivor.err;
      EXPECT_EQ(culprit.exit_code, 0) << culprit.err;
      continue;
    }
    EXPECT_EQ(survivor.exit_code, 1) << mode;
    EXPECT_THAT(survivor.last_error_line(), AllOf(StartsWith("rank 0: "), HasSubstr("rank 1")));
    EXPECT_LT(survivor.seconds, kSeconds);
    if (mode == "mail-kill") {
      EXPECT_THAT(survivor.last_error_line(),
                  AllOf(HasSubstr("micro-batch "), HasSubstr("step 5")));
    }
    if (mode == "throw") {
      EXPECT_EQ(culprit.last_error_line(), "rank 1: rank fails on purpose");
    }
  }
}

// c10d prints what it throws as an error of its own: the same, without the rank.
TEST(OtherLaunchers, ARankThatFindsNobodySaysSoInOneLine) {
  auto variables = tessera::base::environment();
  variables.erase("TORCH_CPP_LOG_LEVEL");
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = "2";
  variables["RANK"] = variables["LOCAL_RANK"] = "1";
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = "1";  // needs rights that no test has
  const auto outcome =
      Program(arguments({.mode = "alone", .rank = 1, .timeout_ms = 500}), variables).wait();
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_EQ(outcome.err, outcome.last_error_line() + "\n");
  EXPECT_THAT(outcome.err, StartsWith("rank 1: store: "));
}

}  // namespace
}  // namespace tessera::process_test
