// [Note: failure]: for every failure of a rank, all processes are gone in time and the culprit is
// named last.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <random>

#include "base/environment.h"
#include "support/test.h"
#include "unit/comm/spawned_programs.h"

namespace tessera::process_test {
namespace {

/// By all, 4 s, and for no other.
void expect_waited_for(const Outcome& outcome, int rank) {
  const std::string waited = "waited 4 s for rank ", found = std::to_string(rank) + ";";
  expect_end(outcome, 1, Says(waited + found), kSeconds + 4);
  for (auto at = outcome.err.find(waited); at != std::string::npos;
       at = outcome.err.find(waited, at + 1)) {
    EXPECT_EQ(outcome.err.substr(at + waited.size(), 2), found) << outcome.err;
  }
}

TEST(OwnSpawn, AllRanksFinish) {
  int nproc = 0;
  for (const auto& outcome : run_all({{.nproc = 1}, {.nproc = 2}, {.nproc = 3}})) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    ++nproc;
    for (int rank = 0; rank < nproc; ++rank) {
      EXPECT_THAT(outcome.out, Says("done " + std::to_string(rank)));
    }
  }
}

TEST(OwnSpawn, ZeroRanksAreRefused) {
  const auto outcome = run({.nproc = 0});
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, Says("--nproc: found 0"));
}

// All ranks watch each other once they have met, whichever groups a program opens.
TEST(OwnSpawn, ARankThatSharesNoGroupWithTheOthersIsMissedWhileTheyWait) {
  expect_end(run({.nproc = 3, .mode = "apart", .rank = 1}), 1,
             Says("rank 1 has given no sign of life"));
}

class AnyRank : public testing::TestWithParam<int> {
 protected:
  std::string name() const { return "rank " + std::to_string(GetParam()) + ": "; }
  /// The plan at moments that are the same in every run of the test.
  std::vector<Plan> at_moments(Plan plan, int count) const {
    std::mt19937 random(static_cast<unsigned>(17 + GetParam()));
    std::vector<Plan> plans;
    for (int i = 0; i < count; ++i) {
      plan.step = static_cast<int>(random() % 30);
      plans.push_back(plan);
    }
    return plans;
  }
  std::vector<Plan> in_modes(Plan plan, const std::vector<std::string>& modes) const {
    std::vector<Plan> plans;
    for (const auto& mode : modes) {
      plan.mode = mode;
      plans.push_back(plan);
    }
    return plans;
  }
};

TEST_P(AnyRank, ThatThrowsIsNamedWithItsError) {
  for (const auto& outcome : run_all(at_moments({.mode = "throw", .rank = GetParam()}, 3))) {
    expect_end(outcome, 1, name() + "rank fails on purpose");
  }
}

// Naive: a rank leaves by _exit, and what it has printed into a pipe is still in its buffer.
TEST_P(AnyRank, ThatThrowsLosesNothingOfWhatWasPrintedBefore) {
  const auto outcomes = run_all(in_modes({.rank = GetParam(), .step = 3}, {"throw", "usage"}));
  EXPECT_EQ(outcomes[0].exit_code, 1);
  EXPECT_EQ(outcomes[1].exit_code, 2);
  for (const auto& outcome : outcomes) {
    for (const int rank : {0, 1}) {
      EXPECT_THAT(outcome.out, Says("begun " + std::to_string(rank) + "\n")) << outcome.err;
    }
  }
}

TEST_P(AnyRank, ThatIsKilledIsNamedWithItsSignal) {
  for (const auto& outcome :
       run_all(at_moments({.nproc = 3, .mode = "kill", .rank = GetParam()}, 3))) {
    expect_end(outcome, 137, name() + "killed by signal 9 (SIGKILL)");
  }
}

TEST_P(AnyRank, ThatStallsIsNamedAfterTheTimeout) {
  const auto plan = at_moments({.rank = GetParam(), .timeout_ms = 1000}, 1).front();
  for (const auto& outcome : run_all(in_modes(plan, {"stall", "stop"}))) {
    expect_end(outcome, 1,
               AllOf(StartsWith("rank " + std::to_string(1 - GetParam()) + ": "),
                     Says("waited 1 s for rank " + std::to_string(GetParam()))),
               kSeconds + 1);
  }
}

// Most ranks wait for one that waits itself, since control messages are relayed.
TEST_P(AnyRank, ThatStallsIsNamedByAllOfMany) {
  expect_waited_for(
      run({.nproc = 6, .mode = "stall", .rank = GetParam(), .step = 4, .timeout_ms = 4000}),
      GetParam());
}

TEST_P(AnyRank, ThatWaitsInAnotherGroupIsNamedWithTheRankThatWaitsForIt) {
  expect_end(run({.mode = "cross", .rank = GetParam(), .step = 3}), 1,
             Says("ranks wait for each other: rank 0 waits in", "has not issued; rank 1 waits in"));
}

// Whose wait ends first closes its connections: that must not make a culprit of it.
TEST_P(AnyRank, ThatStallsIsNamedByWhoWaitsForItAndNotByWhoWaitsForThose) {
  const auto outcome =
      run({.nproc = 3, .mode = "withhold", .rank = GetParam(), .step = 2, .timeout_ms = 1000});
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.last_error_line(),
              Says("waited 1 s for rank " + std::to_string(GetParam()) + ";"))
      << outcome.err;
  EXPECT_THAT(outcome.err, Not(Says("lost rank")));
  EXPECT_LT(outcome.seconds, kSeconds + 1);
}

TEST_P(AnyRank, ThatExitsSilentlyIsNamedWithItsCode) {
  const auto outcome = run({.mode = "exit", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 7);
  EXPECT_EQ(outcome.last_error_line(), name() + "ended with exit code 7");
}

TEST_P(AnyRank, ThatDisagreesIsNamedWithAnother) {
  expect_end(run({.mode = "disagree", .rank = GetParam(), .step = 3}), 1,
             Says("ranks disagree: rank 0 issues", "but rank 1 issues"));
}

TEST_P(AnyRank, ThatAbortsItsWorldCanRecoverWithTheOthers) {
  const auto outcome = run({.mode = "abort", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Others learn that it failed before its exception has come through its stack, and may be gone by
// then: what counts is the exception.
TEST_P(AnyRank, WhoseErrorTakesLongerThanWordOfItIsNamedWithTheError) {
  expect_end(run({.mode = "unwind", .rank = GetParam(), .step = 3}), 1,
             name() + "rank fails on purpose");
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
  const std::string rank = "rank " + std::to_string(GetParam());
  const Plan plan{.nproc = 3,
                  .mode = "work-endless",
                  .rank = GetParam(),
                  .step = GetParam(),
                  .timeout_ms = 3000};
  expect_end(run(plan), 1, Says("10 s", rank + " was busy with: hashing the data"), kSeconds + 10);
}

// Far below the 60 s for which its work would be waited for.
TEST_P(AnyRank, ThatIsLostBeforeTheFirstStepIsNoticedInSeconds) {
  std::vector<Plan> plans;
  for (const int step : {0, 1}) {
    plans.push_back({.nproc = 3, .mode = "work-kill", .rank = GetParam(), .step = step});
    plans.push_back(
        {.nproc = 3, .mode = "work-stop", .rank = GetParam(), .step = step, .timeout_ms = 3000});
  }
  const auto outcomes = run_all(plans);
  for (std::size_t i = 0; i < plans.size(); i += 2) {
    const Outcome& killed = outcomes[i];
    const Outcome& stopped = outcomes[i + 1];
    expect_end(killed, 137, name() + "killed by signal 9 (SIGKILL)");
    expect_end(stopped, 1, Says("rank " + std::to_string(GetParam())));
  }
}

// Messages between stages among processes: who fails while another one waits for its message.
TEST(Messages, ReachTheirReceives) {
  const auto outcomes = run_all({{.nproc = 2, .mode = "p2p-none", .steps = 60},
                                 {.nproc = 4, .mode = "p2p-none", .steps = 60}});
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcomes[0].out, Says("done 1"));
  EXPECT_THAT(outcomes[1].out, Says("done 3"));
}

TEST_P(AnyRank, ThatIsKilledBetweenMessagesIsNamedWithItsSignal) {
  for (const auto& outcome :
       run_all(at_moments({.nproc = 3, .mode = "p2p-kill", .rank = GetParam()}, 3))) {
    expect_end(outcome, 137, name() + "killed by signal 9 (SIGKILL)");
  }
}

TEST_P(AnyRank, ThatThrowsBetweenMessagesIsNamedWithItsError) {
  expect_end(run({.nproc = 3, .mode = "p2p-throw", .rank = GetParam(), .step = 5}), 1,
             name() + "rank fails on purpose");
}

TEST_P(AnyRank, ThatStallsBetweenMessagesIsNamedWithTheMessageThatIsWaitedFor) {
  const Plan plan{.rank = GetParam(), .step = 4, .timeout_ms = 1000};
  for (const auto& outcome : run_all(in_modes(plan, {"p2p-stall", "p2p-stop"}))) {
    EXPECT_EQ(outcome.exit_code, 1) << outcome.err;
    const std::string other = std::to_string(1 - GetParam());
    // The first stage waits for gradients, the second one for activations.
    EXPECT_THAT(outcome.last_error_line(),
                AllOf(StartsWith("rank " + other + ": "),
                      Says(GetParam() == 0 ? "activations of stage 0, micro-batch 0, step 4"
                                           : "gradients of stage 1, micro-batch 0, step 4"),
                      Says("waited 1 s for rank " + std::to_string(GetParam()))))
        << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds + 1);
  }
}

// Stages further away wait for one that waits itself.
TEST_P(AnyRank, ThatStallsBetweenMessagesIsNamedByAllStages) {
  expect_waited_for(
      run({.nproc = 4, .mode = "p2p-stall", .rank = GetParam(), .step = 4, .timeout_ms = 4000}),
      GetParam());
}

TEST_P(AnyRank, ThatAbortsBetweenMessagesCanRecoverWithTheOthers) {
  const auto outcome = run({.nproc = 3, .mode = "p2p-poison", .rank = GetParam(), .step = 3});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

TEST_P(AnyRank, WhoseMessageIsOfAnotherShapeIsNamedWithTheOtherEnd) {
  expect_end(run({.mode = "p2p-shape", .rank = GetParam(), .step = 3}), 1,
             Says("ranks disagree: rank 0 issues ", "[2, 15000] Long", "[30000] Long",
                  "micro-batch 0, step 3"));
}

TEST_P(AnyRank, WhoseMessagesAreSwappedIsNamedWithTheOtherEnd) {
  expect_end(run({.mode = "p2p-swap", .rank = GetParam(), .step = 3}), 1,
             Says("ranks wait for each other: rank 0 waits in ", "micro-batch 0, step 3",
                  "has not issued; rank 1 waits"));
}

// Users' collectives among processes: their values, and what ranks that call other things are told.
TEST(UserCalls, HaveTheirValues) {
  for (const auto& outcome : run_all({{.nproc = 1, .mode = "user-none"},
                                      {.nproc = 2, .mode = "user-none"},
                                      {.nproc = 3, .mode = "user-none"}})) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
}

TEST(UserCalls, ThatDifferAreNamedTogether) {
  const std::vector<std::pair<std::string, std::string>> differences{
      {"user-operation", "broadcast of loss"},
      {"user-shape", "sum of [3, 2]"},
      {"user-dtype", "24 B Int"},
      {"user-order", "barrier of end"},
  };
  std::vector<Plan> plans;
  for (const auto& [mode, called] : differences) {
    plans.push_back({.nproc = 3, .mode = mode, .rank = 1});
  }
  const auto outcomes = run_all(plans);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const auto& [mode, called] = differences[i];
    const Outcome& outcome = outcomes[i];
    EXPECT_EQ(outcome.exit_code, 1) << mode;
    EXPECT_THAT(outcome.last_error_line(),
                Says("ranks disagree", called, "all_reduce of loss", "sum of [2, 3]"))
        << outcome.err;
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

TEST(UserCalls, ThatOneRankLeavesOutNameIt) {
  expect_end(run({.nproc = 3, .mode = "user-absent", .rank = 1, .timeout_ms = 4000}), 1,
             Says("all_reduce of loss", "waited 4 s for rank 1"), kSeconds + 4);
}

TEST(UserCalls, ThatAreRefusedOnOneRankEndTheOthersWithItsError) {
  expect_end(run({.nproc = 3, .mode = "user-refused", .rank = 1}), 2,
             StartsWith("rank 1: all_reduce of loss: found sizes [3, 2]"));
}

INSTANTIATE_TEST_SUITE_P(Process, AnyRank, testing::Values(0, 1),
                         [](const auto& one) { return "Rank" + std::to_string(one.param); });

TEST(OwnSpawn, SignalsArePassedOn) {
  Program program(arguments({.mode = "none", .steps = 1000000}), base::environment());
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
  const std::vector<std::string> modes{"none", "kill", "throw", "p2p-kill"};
  std::vector<Plan> plans;
  for (const auto& mode : modes) plans.push_back({.mode = mode, .rank = 1, .step = 5});
  const auto runs = run_all_without_parent(plans);
  for (std::size_t i = 0; i < modes.size(); ++i) {
    const std::string& mode = modes[i];
    const auto& outcomes = runs[i];
    const Outcome& survivor = outcomes[0];
    const Outcome& culprit = outcomes[1];
    if (mode == "none") {
      EXPECT_EQ(survivor.exit_code, 0) << survivor.err;
      EXPECT_EQ(culprit.exit_code, 0) << culprit.err;
      continue;
    }
    EXPECT_EQ(survivor.exit_code, 1) << mode;
    EXPECT_THAT(survivor.last_error_line(), AllOf(StartsWith("rank 0: "), Says("rank 1")));
    EXPECT_LT(survivor.seconds, kSeconds);
    if (mode == "p2p-kill") {
      EXPECT_THAT(survivor.last_error_line(), Says("micro-batch ", "step 5"));
    }
    if (mode == "throw") {
      EXPECT_EQ(culprit.last_error_line(), "rank 1: rank fails on purpose");
    }
  }
}

// c10d prints what it throws as an error of its own: the same, without the rank.
TEST(OtherLaunchers, ARankThatFindsNoOneSaysSoInOneLine) {
  auto variables = base::environment();
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
