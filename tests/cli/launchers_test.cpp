// The program as ranks of every launcher: the same numbers, errors logged once, lost ranks named,
// nothing that listens beyond this host. Several hosts: several_hosts_test.cpp.
#include <signal.h>

#include <nlohmann/json.hpp>

#include "cli/listening.h"
#include "cli/program.h"
#include "cli/spawned_run.h"
#include "launch/hosts.h"
#include "proof.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::launchers_test {
namespace {

using std::chrono::seconds;

constexpr seconds kPatience{120};  // for a run that is to end by itself
constexpr seconds kGone{10};

std::string log_of(int rank) { return "run/logs/rank_" + std::to_string(rank) + ".log"; }

std::string starter_name(const ::testing::TestParamInfo<Starter>& one) {
  return name_of(one.param);
}

class Launchers : public ::testing::TestWithParam<Starter> {
 protected:
  void SetUp() override {
    const std::string why = why_not(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
    write_golden_run(folder_);
  }
  Words command(int ranks, const Words& words) const {
    return started_by(GetParam(), ranks, words);
  }
  /// Until it ends by itself.
  int run(const Words& command, const Variables& set = {}) {
    Process process(folder_.path(), command, set);
    const int code = process.wait(kPatience).value_or(-1);
    err_ = process.err();
    return code;
  }
  /// Waits until the ranks are in their steps.
  void wait_for_steps(const Process& process) const {
    EXPECT_TRUE(wait_until(seconds(120), [&] { return !read_so_far(metrics_of(folder_)).empty(); }))
        << process.err();
  }
  bool is_torchrun() const {
    return GetParam() == Starter::kTorchrun || GetParam() == Starter::kStaticTorchrun;
  }
  /// torchrun has one code for all failures, and a report of its own.
  void expect_exit_code(int found, int expected) const {
    if (!is_torchrun()) {
      EXPECT_EQ(found, expected) << err_;
      return;
    }
    EXPECT_EQ(found, 1);
    EXPECT_THAT(err_, Says("(exitcode: " + std::to_string(expected) + ")"));
  }
  Words endless(int ranks) const {
    return command(ranks, {"train", "run.toml", "--training.steps", "1000000", "--metrics.log_freq",
                           "1000000"});
  }

  const TemporaryFolder folder_;
  std::string err_;
};

class OtherLaunchers : public Launchers {};

TEST_P(OtherLaunchers, TrainTheSameBitsAsOwnSpawn) {
  ASSERT_EQ(run(command(2, {"train", "run.toml"})), 0) << err_;
  const GoldenRun& expected = spawned_run();
  const GoldenRun found = read_golden_run(folder_);
  EXPECT_EQ(expected.losses_and_norms.size(), 6U);
  EXPECT_EQ(found.losses_and_norms, expected.losses_and_norms);
  // A launcher's own memory (torchrun is a Python with torch: twice ours) is not the ranks'.
  EXPECT_NEAR(found.peak_rss_mib, expected.peak_rss_mib, 0.25 * expected.peak_rss_mib);
}

// After there is a World, too, each rank finds the error for itself.
TEST_P(OtherLaunchers, WhatAllRanksRefuseOnceTheyHaveMetIsSaidOnce) {
  expect_exit_code(run(command(3, {"train", "run.toml", "--model.path", "absent"})), 2);
  EXPECT_EQ(lines_with(err_, "absent").size(), 1U) << err_;
}

TEST_P(OtherLaunchers, ALostRankIsNamedByEveryOther) {
  constexpr int kRanks = 3;
  // Rank 0, which may serve the store, and another; scripts/full kills: all.
  const int other = 1 + static_cast<int>(GetParam()) % 2;
  for (int victim = 0; victim < kRanks; ++victim) {
    if (victim > 0 && victim != other && !test::full_proof()) continue;
    SCOPED_TRACE("rank " + std::to_string(victim) + " is killed");
    std::filesystem::remove_all(folder_ / "run");
    // Open MPI's mpirun kills the others after a second: on a busy host before they say why.
    Process process(folder_.path(), endless(kRanks), {{"OMPI_MCA_odls_base_sigkill_timeout", "4"}});
    const auto ranks = process.wait_for_ranks(kRanks);
    ASSERT_EQ(ranks.size(), static_cast<std::size_t>(kRanks)) << process.err();
    wait_for_steps(process);
    kill(ranks.at(victim), SIGKILL);
    const auto event = std::chrono::steady_clock::now();
    for (const auto& [rank, pid] : ranks) {
      EXPECT_TRUE(wait_until(event + kGone, [&] { return !alive(pid); })) << "rank " << rank;
    }
    EXPECT_NE(process.wait(kPatience).value_or(0), 0) << process.err();
    for (const auto& [rank, pid] : ranks) {
      // MPICH's mpiexec kills the others on the spot.
      if (rank == victim || GetParam() == Starter::kHydra) continue;
      // Not what the launcher passed on: it may end before it has read everything.
      const std::string log = read_file(folder_ / log_of(rank));
      EXPECT_FALSE(lines_with(log, "rank " + std::to_string(victim)).empty())
          << "rank " << rank << " says: " << log << process.err();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Program, OtherLaunchers,
                         ::testing::Values(Starter::kTorchrun, Starter::kStaticTorchrun,
                                           Starter::kOpenMpi, Starter::kHydra, Starter::kPmi,
                                           Starter::kSlurm),
                         starter_name);

/// Before ranks meet all they know is what their launcher tells them, and torchrun tells them the
/// same wherever its store is.
class BeforeTheyMeet : public Launchers {};

TEST_P(BeforeTheyMeet, AnotherNprocIsRefusedOnce) {
  expect_exit_code(run(command(2, {"train", "run.toml", "--nproc", "3"})), 2);
  EXPECT_EQ(lines_with(err_, "tessera: usage: --nproc: found 3, expected 2, the ranks that").size(),
            1U)
      << err_;
}

TEST_P(BeforeTheyMeet, WhatAllRanksRefuseIsSaidOnce) {
  expect_exit_code(run(command(3, {"train", "run.toml", "--training.stpes", "3"})), 2);
  EXPECT_EQ(lines_with(err_, "unknown key").size(), 1U) << err_;
}

INSTANTIATE_TEST_SUITE_P(Program, BeforeTheyMeet,
                         ::testing::Values(Starter::kTorchrun, Starter::kOpenMpi, Starter::kHydra,
                                           Starter::kPmi, Starter::kSlurm),
                         starter_name);

class OpenMpi : public Launchers {};

TEST_P(OpenMpi, ARankThatIsRefusedAloneSaysSoAndEndsTheOthers) {
  Words words = command(1, {"train", "run.toml"});
  words.insert(words.end(), {":", "-np", "1", TESSERA_PROGRAM, "train", "absent.toml"});
  EXPECT_EQ(run(words), 2) << err_;
  EXPECT_EQ(lines_with(err_, "absent.toml").size(), 1U) << err_;
}

INSTANTIATE_TEST_SUITE_P(Program, OpenMpi, ::testing::Values(Starter::kOpenMpi), starter_name);

/// Those under which rank 0 serves the store, at a port that was not kept for it.
class WithoutAgent : public Launchers {};

TEST_P(WithoutAgent, APortInUseIsAFailureThatNamesIt) {
  const comm::Listener taken = comm::listen_on("127.0.0.1", 0);
  const std::string port = std::to_string(taken.port);
  for (const std::string host : {"127.0.0.1", "0.0.0.0"}) {
    const Variables address{{"MASTER_ADDR", host}, {"MASTER_PORT", port}};
    // Where no launcher ends it, rank 1 waits this long for rank 0; where one does, rank 0 has to
    // be heard before.
    const bool ends = GetParam() == Starter::kOpenMpi || GetParam() == Starter::kHydra;
    const Words words{"train", "run.toml", "--comm.init_timeout_seconds", ends ? "5" : "2"};
    EXPECT_EQ(run(command(2, words), address), 1) << err_;
    EXPECT_EQ(lines_with(err_, "rank 0: store: found port " + port + " of " + host +
                                   " in use, expected a free one")
                  .size(),
              1U)
        << err_;
  }
}

INSTANTIATE_TEST_SUITE_P(Program, WithoutAgent,
                         ::testing::Values(Starter::kOpenMpi, Starter::kHydra, Starter::kPmi,
                                           Starter::kSlurm),
                         starter_name);

TEST_P(Launchers, TheSameNprocIsAcceptedAndRanksListenOnLoopbackOnly) {
  Words words = endless(2);
  if (GetParam() != Starter::kOwnSpawn) words.insert(words.end(), {"--nproc", "2"});  // has it
  Process process(folder_.path(), words);
  const auto ranks = process.wait_for_ranks(2);
  ASSERT_EQ(ranks.size(), 2U) << process.err();
  wait_for_steps(process);
  for (const auto& [rank, pid] : ranks) {
    const auto addresses = listening_addresses(pid);
    EXPECT_FALSE(addresses.empty()) << "Gloo listens for the other rank";
    for (const std::string& address : addresses) EXPECT_EQ(address, "127.0.0.1");
  }
}

INSTANTIATE_TEST_SUITE_P(Program, Launchers,
                         ::testing::Values(Starter::kOwnSpawn, Starter::kTorchrun,
                                           Starter::kStaticTorchrun, Starter::kOpenMpi,
                                           Starter::kHydra, Starter::kPmi, Starter::kSlurm),
                         starter_name);

}  // namespace
}  // namespace tessera::cli::launchers_test
