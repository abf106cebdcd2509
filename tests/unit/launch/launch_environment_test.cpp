#include "launch/launch_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/error.h"
#include "unit/io/temporary_folder.h"

namespace tessera::comm::launch_environment_test {
namespace {

using base::Environment;
using ::testing::HasSubstr;

Environment torchrun(const std::string& rank, const std::string& size) {
  return {{"RANK", rank},
          {"WORLD_SIZE", size},
          {"LOCAL_RANK", rank},
          {"LOCAL_WORLD_SIZE", size},
          {"MASTER_ADDR", "10.1.2.3"},
          {"MASTER_PORT", "4711"}};
}

Environment with(Environment variables, const Environment& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Environment without(Environment variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

std::string error_of(const Environment& variables, const StoreAddress& fallback = {}) {
  try {
    read_launch_environment(variables, fallback);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "no error";
}

const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                              {"OMPI_COMM_WORLD_SIZE", "4"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                              {"PMIX_NAMESPACE", "job7"}};
const Environment kPmi = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Environment kPmiSomewhere = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
const Environment kSlurm = {{"SLURM_STEP_ID", "0"},        {"SLURM_PROCID", "5"},
                            {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"},
                            {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_JOB_ID", "99"}};
const Environment kSpawn = {{"TESSERA_SPAWN_RANK", "0"},
                            {"TESSERA_SPAWN_SIZE", "2"},
                            {"TESSERA_SPAWN_PORT", "5000"},
                            {"TESSERA_SPAWN_LISTEN_FD", "7"},
                            {"TESSERA_SPAWN_ERROR_FD", "9"}};

TEST(LaunchEnvironment, NothingSetIsASingleProcess) {
  EXPECT_EQ(read_launch_environment({{"HOME", "/root"}}), LaunchEnvironment{});
}

TEST(LaunchEnvironment, TorchrunGivesRankAndAddress) {
  const auto launch = read_launch_environment(torchrun("2", "4"));
  EXPECT_EQ(launch.launcher, Launcher::kTorchrun);
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.hosts, Hosts::kOne);
  EXPECT_EQ(launch.master_addr, "10.1.2.3");
  EXPECT_EQ(launch.master_port, 4711);
  EXPECT_FALSE(launch.agent_store);
}

TEST(LaunchEnvironment, TorchrunsAgentStoreIsServedByTheAgent) {
  const auto launch =
      read_launch_environment(with(torchrun("0", "2"), {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                        {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  EXPECT_TRUE(launch.agent_store);
  EXPECT_EQ(launch.store_prefix, "tessera/attempt_3");
  EXPECT_FALSE(
      read_launch_environment(with(torchrun("0", "2"), {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}))
          .agent_store);
}

TEST(LaunchEnvironment, OpenMpiOnOneHostUsesLoopbackAndAPortOfTheJob) {
  const auto launch = read_launch_environment(kOpenMpi);
  EXPECT_EQ(launch.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_EQ(launch.master_port,
            read_launch_environment(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"},
                                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}))
                .master_port);
  EXPECT_NE(launch.master_port,
            read_launch_environment(with(kOpenMpi, {{"PMIX_NAMESPACE", "job8"}})).master_port);
}

TEST(LaunchEnvironment, JobsKeepTheirKeysApart) {
  const auto prefix = [](const Environment& variables) {
    return read_launch_environment(variables).store_prefix;
  };
  EXPECT_NE(prefix(kOpenMpi), prefix(with(kOpenMpi, {{"PMIX_NAMESPACE", "job8"}})));
  EXPECT_EQ(
      prefix(kOpenMpi),
      prefix(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})));
  const Environment run = with(torchrun("0", "2"), {{"TORCHELASTIC_RUN_ID", "a"}});
  EXPECT_NE(prefix(run), prefix(with(run, {{"TORCHELASTIC_RUN_ID", "b"}})));
  EXPECT_NE(prefix(run), prefix(with(run, {{"TORCHELASTIC_RESTART_COUNT", "1"}})));
}

TEST(LaunchEnvironment, OnlyAnAddressThatOthersNeedOpensTheNetwork) {
  const auto reach_of = [](const Environment& variables) {
    return reach(read_launch_environment(variables));
  };
  EXPECT_EQ(reach_of(kOpenMpi), Reach::kThisHost);
  EXPECT_EQ(reach_of(kSpawn), Reach::kThisHost);
  EXPECT_EQ(reach_of(torchrun("0", "2")), Reach::kThisHost) << "both on this host";
  EXPECT_EQ(reach_of(kPmi), Reach::kThisHost);
  // How many ranks of this host there are is not said: the address decides.
  EXPECT_EQ(reach_of(with(kPmiSomewhere, {{"MASTER_ADDR", "localhost"}})), Reach::kThisHost);
  EXPECT_EQ(reach_of(with(kPmiSomewhere, {{"MASTER_ADDR", "10.1.2.3"}})), Reach::kNetwork);
  EXPECT_EQ(reach_of(with(kSlurm, {{"MASTER_ADDR", "head"}})), Reach::kNetwork);
  EXPECT_EQ(reach_of(with(kSlurm, {{"SLURM_STEP_NODELIST", "a[1-2]"}})), Reach::kNetwork);
}

TEST(LaunchEnvironment, ANameThatMeansLoopbackOnItsOwnHostIsRefusedForSeveralHosts) {
  const auto several = read_launch_environment(with(kSlurm, {{"MASTER_ADDR", "head"}}));
  EXPECT_NO_THROW(require_network_address(several, "10.0.0.1"));
  try {
    require_network_address(several, "127.0.1.1");
    FAIL() << "nobody else reaches 127.0.1.1";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    EXPECT_THAT(error.what(), HasSubstr("head leads to 127.0.1.1 on the host of rank 5"));
  }
  // Somebody tries several "hosts" on one.
  const auto asked = read_launch_environment(with(kSlurm, {{"MASTER_ADDR", "127.0.0.1"}}));
  EXPECT_NO_THROW(require_network_address(asked, "127.0.0.1"));
  EXPECT_NO_THROW(require_network_address(read_launch_environment(kPmi), "127.0.0.1"));
}

// Gloo would tell the others 127.0.0.1, and those of other hosts would wait for nobody.
TEST(LaunchEnvironment, AllAddressesOfRank0DoNotLeadToLoopbackUnlessOneHostIsCertain) {
  for (const char* host : {"0.0.0.0", "::"}) {
    const auto unknown = read_launch_environment(with(kPmiSomewhere, {{"MASTER_ADDR", host}}));
    EXPECT_NO_THROW(require_network_address(unknown, host)) << "the store itself";
    EXPECT_NO_THROW(require_network_address(unknown, "10.0.0.1"));
    EXPECT_THAT(
        testing::error_of(ErrorKind::kComm, [&] { require_network_address(unknown, "127.0.0.1"); }),
        HasSubstr("GLOO_SOCKET_IFNAME"))
        << host;
    const auto one = read_launch_environment(with(kPmi, {{"MASTER_ADDR", host}}));
    EXPECT_NO_THROW(require_network_address(one, "127.0.0.1")) << host;
  }
  const auto named = read_launch_environment(with(kPmiSomewhere, {{"MASTER_ADDR", "head"}}));
  EXPECT_NO_THROW(require_network_address(named, "127.0.1.1")) << "perhaps all are there";
}

TEST(LaunchEnvironment, LoopbackAddressesAreKnown) {
  for (const char* host : {"127.0.0.1", "127.1.2.3", "::1", "localhost"}) {
    EXPECT_TRUE(is_loopback(host)) << host;
  }
  for (const char* host : {"", "0.0.0.0", "10.0.0.127", "::", "localhost.example", "head"}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(LaunchEnvironment, PmiAndSlurmAreRead) {
  const auto pmi = read_launch_environment(kPmi);
  EXPECT_EQ(pmi.launcher, Launcher::kPmi);
  EXPECT_EQ(pmi.rank, 1);
  const auto slurm = read_launch_environment(kSlurm, {"head", 1234});
  EXPECT_EQ(slurm.launcher, Launcher::kSlurm);
  EXPECT_EQ(slurm.rank, 5);
  EXPECT_EQ(slurm.world_size, 8);
  EXPECT_EQ(slurm.local_rank, 1);
  EXPECT_EQ(slurm.hosts, Hosts::kSeveral);
  EXPECT_EQ(slurm.master_addr, "head");
  EXPECT_EQ(slurm.master_port, 1234);
}

TEST(LaunchEnvironment, PmiOnOneHostIsKnownByItsLocalRanks) {
  const auto launch = read_launch_environment(kPmi);
  EXPECT_EQ(launch.hosts, Hosts::kOne);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.master_addr, "127.0.0.1");
  EXPECT_THAT(error_of(with(kPmi, {{"PMI_SIZE", "4"}})), HasSubstr("on several hosts"));
}

TEST(LaunchEnvironment, WhereNobodySaysHowManyHostsAnAddressIsNeeded) {
  const auto neither = HasSubstr("says neither where nor an address; set MASTER_ADDR");
  EXPECT_THAT(error_of(kPmiSomewhere), neither);
  EXPECT_THAT(error_of(with(kPmiSomewhere, {{"MASTER_ADDR", ""}})), neither);
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), neither);
  EXPECT_EQ(read_launch_environment(kPmiSomewhere, {"127.0.0.1", 0}).master_addr, "127.0.0.1");
  EXPECT_EQ(
      read_launch_environment(with(kPmiSomewhere, {{"MASTER_ADDR", ""}}), {"head", 0}).master_addr,
      "head");
}

TEST(LaunchEnvironment, SrunsOwnPmiLeavesTheHostsToTheStep) {
  const Environment both = with(kSlurm, {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}});
  EXPECT_EQ(read_launch_environment(both, {"head", 1}),
            read_launch_environment(kSlurm, {"head", 1}));
  // mpiexec inside an allocation: its proxies are the step's tasks, its ranks are others.
  const Environment inside = with(
      kSlurm,
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  EXPECT_EQ(read_launch_environment(inside).launcher, Launcher::kPmi);
}

TEST(LaunchEnvironment, SlurmsNodeListStandsForAnAddressThatNobodyGives) {
  const Environment listed = with(kSlurm, {{"SLURM_STEP_NODELIST", "node[01-02]"}});
  const auto launch = read_launch_environment(listed);
  EXPECT_EQ(launch.node_list, "node[01-02]");
  EXPECT_EQ(launch.master_addr, "");
  EXPECT_THAT(to_string(launch), HasSubstr("store at the first host of node[01-02]:"));
  EXPECT_EQ(read_launch_environment(listed, {"head", 0}).master_addr, "head");
  EXPECT_EQ(read_launch_environment(listed, {"head", 0}).node_list, "");
  EXPECT_EQ(read_launch_environment(with(listed, {{"SLURM_STEP_NUM_NODES", "1"}})).master_addr,
            "127.0.0.1");
  EXPECT_EQ(read_launch_environment(without(listed, "SLURM_STEP_NUM_NODES")).node_list,
            "node[01-02]")
      << "how many hosts they are does not matter";
}

TEST(LaunchEnvironment, StepsOfOneSlurmJobHavePortsOfTheirOwn) {
  const Environment one_host = with(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"}});
  const auto port = [&](const std::string& step) {
    return read_launch_environment(with(one_host, {{"SLURM_STEP_ID", step}})).master_port;
  };
  EXPECT_NE(port("0"), port("1"));
  EXPECT_GE(port("0"), 10000);
  EXPECT_LT(port("0"), 30000);
}

TEST(LaunchEnvironment, SlurmOutsideAStepOfSeveralTasksIsNoLauncher) {
  EXPECT_EQ(read_launch_environment(without(kSlurm, "SLURM_STEP_ID")).launcher, Launcher::kSingle);
  EXPECT_EQ(read_launch_environment(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "1"}})).launcher,
            Launcher::kSingle);
}

TEST(LaunchEnvironment, OwnSpawnCarriesItsDescriptors) {
  const auto launch = read_launch_environment(kSpawn);
  EXPECT_EQ(launch.launcher, Launcher::kOwnSpawn);
  EXPECT_EQ(launch.listen_fd, 7);
  EXPECT_EQ(launch.error_fd, 9);
  EXPECT_EQ(launch.master_port, 5000);
  EXPECT_EQ(launch.hosts, Hosts::kOne);
}

TEST(LaunchEnvironment, FirstLauncherOfTheOrderIsBelieved) {
  Environment all = with(kSpawn, kSlurm);
  EXPECT_EQ(read_launch_environment(all, {"head", 1}).launcher, Launcher::kSlurm);
  all = with(all, kPmi);
  EXPECT_EQ(read_launch_environment(all).launcher, Launcher::kPmi);
  all = with(all, kOpenMpi);
  EXPECT_EQ(read_launch_environment(all).launcher, Launcher::kOpenMpi);
  all = with(all, torchrun("0", "2"));
  EXPECT_EQ(read_launch_environment(all).launcher, Launcher::kTorchrun);
}

TEST(LaunchEnvironment, MasterVariablesWinOverOptions) {
  const auto launch = read_launch_environment(torchrun("0", "2"), {"elsewhere", 1});
  EXPECT_EQ(launch.master_addr, "10.1.2.3");
  EXPECT_EQ(launch.master_port, 4711);
}

TEST(LaunchEnvironment, SeveralHostsWithoutAddressIsRefused) {
  EXPECT_THAT(error_of(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}})),
              HasSubstr("several hosts"));
  EXPECT_THAT(error_of(kSlurm), HasSubstr("comm.master_addr"));
}

TEST(LaunchEnvironment, ContradictionsNameTheVariables) {
  EXPECT_THAT(error_of(without(torchrun("0", "2"), "WORLD_SIZE")),
              HasSubstr("RANK without WORLD_SIZE"));
  EXPECT_THAT(error_of(without(torchrun("0", "2"), "RANK")), HasSubstr("WORLD_SIZE without RANK"));
  EXPECT_THAT(error_of(torchrun("2", "2")), HasSubstr("RANK=2 with WORLD_SIZE=2"));
  EXPECT_THAT(error_of(torchrun("-1", "2")), HasSubstr("RANK=-1"));
  EXPECT_THAT(error_of(torchrun("x", "2")), HasSubstr("RANK=\"x\""));
  EXPECT_THAT(error_of(torchrun("", "2")), HasSubstr("RANK=\"\""));
  EXPECT_THAT(error_of(torchrun("0", "0")), HasSubstr("WORLD_SIZE=0"));
  EXPECT_THAT(error_of(torchrun("0", "99999999999")), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(error_of(with(torchrun("0", "2"), {{"LOCAL_RANK", "5"}})), HasSubstr("LOCAL_RANK=5"));
  EXPECT_THAT(error_of(with(torchrun("0", "2"), {{"LOCAL_WORLD_SIZE", "3"}})),
              HasSubstr("LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2"));
  EXPECT_THAT(error_of(with(torchrun("0", "2"), {{"MASTER_PORT", "70000"}})),
              HasSubstr("MASTER_PORT=70000"));
  EXPECT_THAT(error_of(without(with(torchrun("0", "2"), {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
                               "MASTER_PORT")),
              HasSubstr("MASTER_PORT not set"));
  EXPECT_THAT(error_of(without(kSpawn, "TESSERA_SPAWN_SIZE")), HasSubstr("TESSERA_SPAWN_SIZE"));
}

}  // namespace
}  // namespace tessera::comm::launch_environment_test
