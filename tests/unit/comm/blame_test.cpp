// Who is named where several ranks stop waiting: of ranks that call different things, which their
// programs may catch, and of those that come to a collective one after the other.
#include <signal.h>

#include "support/test.h"
#include "unit/comm/spawned_programs.h"

namespace tessera::process_test {
namespace {

// [Note: disagreements]. Naive: the first watch that finds one ends its process, and so the run.
TEST(Disagreements, CanBeCaughtOnEveryRankAndTheRunContinues) {
  const std::vector<Plan> plans{{.nproc = 2, .mode = "caught", .step = 1, .steps = 6},
                                {.nproc = 3, .mode = "caught", .step = 2, .steps = 6},
                                {.nproc = 4, .mode = "caught", .step = 3, .steps = 6}};
  const auto outcomes = run_all(plans);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const Outcome& outcome = outcomes[i];
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    for (int rank = 0; rank < plans[i].nproc; ++rank) {
      EXPECT_THAT(outcome.out, Says("done " + std::to_string(rank))) << outcome.err;
    }
  }
}

// Naive: the store ends with rank 0, and a rank that leaves a little later is ended for that.
TEST(Disagreements, ThatAreCaughtEndNoOneWhoLeavesThen) {
  const auto outcome = run({.nproc = 3, .mode = "caught-leave"});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
}

// Rank 2 shares no group with those that disagree: they recover, and would wait for it forever.
// Naive: the error of a thread of the library, which the program has not waited for, is one of the
// program's.
TEST(Disagreements, EndARankThatComesToNoCallOfTheLibrary) {
  for (const auto& outcome : run_all({{.nproc = 4, .mode = "apart-uncaught", .rank = 2},
                                      {.nproc = 4, .mode = "apart-unwaited", .rank = 2}})) {
    expect_end(outcome, 1,
               AllOf(StartsWith("rank 2: ranks disagree: rank 0 issues"),
                     Says("this rank made no call of the library")));
  }
}

// Naive: an aborted World watches no rank, and the others wait in vain until the timeout of 100 s;
// or the loss counts as the disagreement, which one rank prints for all.
TEST(Disagreements, NameARankThatIsKilledBeforeTheRecovery) {
  const std::vector<Plan> plans{{.nproc = 3, .mode = "caught-kill", .rank = 0},
                                {.nproc = 3, .mode = "caught-kill", .rank = 1}};
  auto spawned = std::async(std::launch::async, [&] { return run_all(plans); });
  const auto without_parent = run_all_without_parent(plans);
  const auto outcomes = spawned.get();
  for (const int victim : {0, 1}) {
    const auto& ranks = without_parent[static_cast<std::size_t>(victim)];
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const Outcome& one = ranks[rank];
      if (std::cmp_equal(rank, victim)) {
        EXPECT_EQ(one.exit_code, 1000 + SIGKILL);
        continue;
      }
      EXPECT_EQ(one.exit_code, 1);
      EXPECT_THAT(one.last_error_line(), Says("rank " + std::to_string(victim)));
      EXPECT_LT(one.seconds, ranks[static_cast<std::size_t>(victim)].seconds + 10);
    }
    const Outcome& outcome = outcomes[static_cast<std::size_t>(victim)];
    expect_end(outcome, 137, "rank " + std::to_string(victim) + ": killed by signal 9 (SIGKILL)");
  }
}

// A disagreement led to no report: what ranks said about it must not appear in a later one.
TEST(Disagreements, ThatAreCaughtLeaveALaterHangItsReport) {
  for (const auto& outcome :
       run_all({{.nproc = 2, .mode = "caught-stall", .rank = 0, .step = 3, .timeout_ms = 1500},
                {.nproc = 3, .mode = "caught-stall", .rank = 1, .step = 2, .timeout_ms = 1500}})) {
    const int nproc = outcome.err.find("of 2 ranks") == std::string::npos ? 3 : 2;
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.err,
                AllOf(Says(concat("hang report: ", nproc, " of ", nproc, " ranks said")),
                      Says(concat("cause: rank ", nproc - 2,
                                  " computes, and waits for no rank; by the "
                                  "order it should be in all_reduce of sum"))));
  }
}

// Messages are relayed, and whose wait has ended first closes its connections while it hears
// others. Naive: who still waits for it then takes it for lost.
TEST(LateRanks, NameTheOneThatNeverComesAndNoneThatWaitedForIt) {
  std::vector<Plan> plans;
  for (const int seed : {1, 2, 3}) {
    plans.push_back({.nproc = 4, .mode = "late", .rank = seed, .step = seed, .timeout_ms = 1000});
  }
  const auto outcomes = run_all(plans);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const std::string& err = outcomes[i].err;
    const std::string missing = std::to_string(plans[i].rank) + ";";
    EXPECT_EQ(outcomes[i].exit_code, 1);
    EXPECT_THAT(outcomes[i].last_error_line(), Says("waited 1 s for rank " + missing)) << err;
    EXPECT_THAT(err, AllOf(Not(Says("lost rank")), Not(Says(" is gone"))));
    const std::string waited = "waited 1 s for rank ";
    for (auto at = err.find(waited); at != std::string::npos; at = err.find(waited, at + 1)) {
      EXPECT_EQ(err.substr(at + waited.size(), missing.size()), missing) << err;
    }
    EXPECT_LT(outcomes[i].seconds, kSeconds);
  }
}

// The rank that comes too late finds connections closed by those whose wait is over, and which
// live. Naive: it calls them lost before their words have come, or they follow its wait to a third
// rank.
TEST(LateRanks, DoNotCallThoseLostThatNoLongerWaitForThem) {
  std::vector<Plan> plans;
  for (const int missing : {1, 3}) {
    plans.push_back({.nproc = 4, .mode = "too-late", .rank = missing, .timeout_ms = 1000});
  }
  const auto outcomes = run_all(plans);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const int missing = plans[i].rank;
    const Outcome& outcome = outcomes[i];
    const std::string waited = "waited 1 s for rank ";
    EXPECT_EQ(outcome.exit_code, 1);
    EXPECT_THAT(outcome.last_error_line(),
                AnyOf(Says(waited + std::to_string((missing + 1) % 4) + ";"),
                      Says(waited + std::to_string(missing) + ";")))
        << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(Not(Says("lost rank")), Not(Says(" is gone"))));
    EXPECT_LT(outcome.seconds, kSeconds);
  }
}

}  // namespace
}  // namespace tessera::process_test
