// Two ranks on two hosts: network namespaces with a cable between them (two_hosts). The bits are
// those of one host, sockets listen on the cable only, and addresses that cannot work are refused.
#include <signal.h>

#include <cstdlib>

#include "cli/listening.h"
#include "cli/spawned_run.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::several_hosts_test {
namespace {

using std::chrono::seconds;

constexpr seconds kPatience{120};
constexpr int kNotAllowed = 77;

class SeveralHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    names("10.77.0.1 node1\n10.77.0.2 node2\n");
    Process possible(folder_.path(), {TESSERA_TWO_HOSTS, "hosts", "true"});
    if (possible.wait(kPatience) == kNotAllowed) {
      GTEST_SKIP() << "no network namespaces here: " << possible.err();
    }
    write_golden_run(folder_);
  }

  void names(const std::string& more) { folder_.write("hosts", "127.0.0.1 localhost\n" + more); }
  /// A scontrol, in front of everything else on PATH.
  Variables scontrol_that_prints(const std::string& lines) {
    const auto file = folder_.write("bin/scontrol", "#!/bin/sh\nprintf '" + lines + "'\n");
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    return {{"PATH", (folder_ / "bin").string() + ":" + std::getenv("PATH")}};
  }
  /// The program as the two ranks of a Slurm step.
  static Words step(const Words& more = {}) {
    return joined(
        {TESSERA_TWO_HOSTS, "hosts", "bash", "-c",
         "export SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
         "SLURM_PROCID=$HOST SLURM_LOCALID=0; exec \"$@\"",
         "step", TESSERA_PROGRAM, "train", "run.toml", "--comm.init_timeout_seconds", "10"},
        more);
  }
  int run(const Words& command, const Variables& set) {
    Process process(folder_.path(), command, set);
    const int code = process.wait(kPatience).value_or(-1);
    err_ = process.err();
    return code;
  }
  void expect_the_bits_of_one_host() const {
    const auto& expected = spawned_run().losses_and_norms;
    EXPECT_EQ(expected.size(), 6U);
    EXPECT_EQ(losses_and_norms(folder_), expected);
  }

  const TemporaryFolder folder_;
  std::string err_;
};

TEST_F(SeveralHosts, OfASlurmStepMeetAtTheFirstThatScontrolNames) {
  Variables set = scontrol_that_prints("node1\\nnode2\\n");
  set["SLURM_STEP_NODELIST"] = "node[1-2]";
  ASSERT_EQ(run(step(), set), 0) << err_;
  expect_the_bits_of_one_host();
}

TEST_F(SeveralHosts, OfTorchrunMeetAtItsMasterAddress) {
  const std::string why = why_not(Starter::kStaticTorchrun);
  if (!why.empty()) GTEST_SKIP() << why;
  const Words torchrun{TESSERA_TWO_HOSTS,
                       "hosts",
                       "bash",
                       "-c",
                       "exec " TESSERA_PYTHON
                       " -m torch.distributed.run --nnodes 2 --node-rank $HOST --master-addr "
                       "10.77.0.1 --master-port 29500 --nproc-per-node 1 --no-python -- \"$@\"",
                       "torchrun",
                       TESSERA_PROGRAM,
                       "train",
                       "run.toml"};
  ASSERT_EQ(run(torchrun, {}), 0) << err_;
  expect_the_bits_of_one_host();
}

// Each has a second network, and /etc/hosts may know either host by another name: the way to the
// store's address decides.
TEST_F(SeveralHosts, ListenOnTheWayToTheAddressOnly) {
  Process process(folder_.path(), step({"--training.steps", "1000000", "--metrics.log_freq",
                                        "1000000", "--comm.master_addr", "10.77.0.1"}));
  const auto ranks = process.wait_for_ranks(2);
  ASSERT_EQ(ranks.size(), 2U) << process.err();
  ASSERT_TRUE(wait_until(kPatience, [&] { return !read_so_far(metrics_of(folder_)).empty(); }))
      << process.err();
  EXPECT_THAT(listening_addresses(ranks.at(0)), ElementsAre("10.77.0.1", "10.77.0.1"))
      << "the store and Gloo";
  EXPECT_THAT(listening_addresses(ranks.at(1)), ElementsAre("10.77.0.2")) << "Gloo";
}

TEST_F(SeveralHosts, ALostRankIsNamedByTheOther) {
  Process process(folder_.path(), step({"--training.steps", "1000000", "--metrics.log_freq",
                                        "1000000", "--comm.master_addr", "10.77.0.1"}));
  const auto ranks = process.wait_for_ranks(2);
  ASSERT_EQ(ranks.size(), 2U) << process.err();
  ASSERT_TRUE(wait_until(kPatience, [&] { return !read_so_far(metrics_of(folder_)).empty(); }))
      << process.err();
  kill(ranks.at(1), SIGKILL);
  EXPECT_EQ(process.wait(seconds(10)).value_or(-1), 128 + SIGKILL) << "the last that failed";
  // By its closed connection or, where the machine is busy, by its silence.
  EXPECT_THAT(lines_with(process.err(), "rank 0: "), Contains(Says("rank 1"))) << process.err();
}

TEST_F(SeveralHosts, WithoutAnAddressAreRefused) {
  EXPECT_EQ(run(step(), {}), 2) << err_;
  EXPECT_THAT(lines_with(err_,
                         "Slurm started 2 ranks on several hosts and says no address; set "
                         "MASTER_ADDR or comm.master_addr"),
              Not(IsEmpty()))
      << err_;
}

TEST_F(SeveralHosts, AScontrolThatNamesNoHostIsRefused) {
  Variables set = scontrol_that_prints("; reboot\\n");
  set["SLURM_STEP_NODELIST"] = "node[1-2]";
  EXPECT_EQ(run(step(), set), 2) << err_;
  EXPECT_THAT(lines_with(err_, "Slurm: found '; reboot' for `scontrol show hostnames 'node[1-2]'`"),
              Not(IsEmpty()))
      << err_;
}

TEST_F(SeveralHosts, AnAddressOfNeitherIsNamed) {
  EXPECT_EQ(run(step(), {{"MASTER_ADDR", "10.77.0.2"}}), 1) << err_;
  EXPECT_EQ(lines_with(err_,
                       "rank 0: store: found 10.77.0.2 (10.77.0.2) as the address of rank 0, "
                       "expected one of its host's own")
                .size(),
            1U)
      << err_;
}

// As Debian writes /etc/hosts: a host's own name is a loopback address.
TEST_F(SeveralHosts, ANameThatIsLoopbackOnItsOwnHostIsNamed) {
  names("127.0.1.1 node1\n");
  EXPECT_EQ(run(step(), {{"MASTER_ADDR", "node1"}}), 1) << err_;
  EXPECT_THAT(lines_with(err_, "store: found that node1 leads to 127.0.0.1 on the host of rank 0"),
              Not(IsEmpty()))
      << err_;
}

}  // namespace
}  // namespace tessera::cli::several_hosts_test
