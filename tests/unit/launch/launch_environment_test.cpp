#include "launch/launch_environment.h"

#include <cstdlib>

#include "launch/hosts.h"
#include "launch/rank_variables.h"
#include "support/temporary_folder.h"

namespace tessera::comm::launch_environment_test {
namespace {

using base::Environment;

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

std::string refusal(const Environment& variables, const StoreAddress& fallback = {}) {
  return refusal_of(ErrorKind::kUsage, [&] { read_launch_environment(variables, fallback); });
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
  EXPECT_REFUSED(kComm, require_network_address(several, "127.0.1.1"),
                 "head leads to 127.0.1.1 on the host of rank 5");
  // Somebody tries several "hosts" on one.
  const auto asked = read_launch_environment(with(kSlurm, {{"MASTER_ADDR", "127.0.0.1"}}));
  EXPECT_NO_THROW(require_network_address(asked, "127.0.0.1"));
  EXPECT_NO_THROW(require_network_address(read_launch_environment(kPmi), "127.0.0.1"));
}

// Gloo would tell the others 127.0.0.1, and those of other hosts would wait in vain.
TEST(LaunchEnvironment, AllAddressesOfRank0DoNotLeadToLoopbackUnlessOneHostIsCertain) {
  for (const char* host : {"0.0.0.0", "::"}) {
    const auto unknown = read_launch_environment(with(kPmiSomewhere, {{"MASTER_ADDR", host}}));
    EXPECT_NO_THROW(require_network_address(unknown, host)) << "the store itself";
    EXPECT_NO_THROW(require_network_address(unknown, "10.0.0.1"));
    EXPECT_REFUSED(kComm, require_network_address(unknown, "127.0.0.1"), "GLOO_SOCKET_IFNAME")
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
  EXPECT_THAT(refusal(with(kPmi, {{"PMI_SIZE", "4"}})), Says("on several hosts"));
}

TEST(LaunchEnvironment, WhereNoOneSaysHowManyHostsAnAddressIsNeeded) {
  const auto neither = Says("says neither where nor an address; set MASTER_ADDR");
  EXPECT_THAT(refusal(kPmiSomewhere), neither);
  EXPECT_THAT(refusal(with(kPmiSomewhere, {{"MASTER_ADDR", ""}})), neither);
  EXPECT_THAT(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), neither);
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

TEST(LaunchEnvironment, SlurmsNodeListStandsForAnAddressThatNoOneGives) {
  const Environment listed = with(kSlurm, {{"SLURM_STEP_NODELIST", "node[01-02]"}});
  const auto launch = read_launch_environment(listed);
  EXPECT_EQ(launch.node_list, "node[01-02]");
  EXPECT_EQ(launch.master_addr, "");
  EXPECT_THAT(to_string(launch), Says("store at the first host of node[01-02]:"));
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
  EXPECT_THAT(refusal(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}})),
              Says("several hosts"));
  EXPECT_THAT(refusal(kSlurm), Says("comm.master_addr"));
}

TEST(LaunchEnvironment, ContradictionsNameTheVariables) {
  EXPECT_THAT(refusal(without(torchrun("0", "2"), "WORLD_SIZE")), Says("RANK without WORLD_SIZE"));
  EXPECT_THAT(refusal(without(torchrun("0", "2"), "RANK")), Says("WORLD_SIZE without RANK"));
  EXPECT_THAT(refusal(torchrun("2", "2")), Says("RANK=2 with WORLD_SIZE=2"));
  EXPECT_THAT(refusal(torchrun("-1", "2")), Says("RANK=-1"));
  EXPECT_THAT(refusal(torchrun("x", "2")), Says("RANK=\"x\""));
  EXPECT_THAT(refusal(torchrun("", "2")), Says("RANK=\"\""));
  EXPECT_THAT(refusal(torchrun("0", "0")), Says("WORLD_SIZE=0"));
  EXPECT_THAT(refusal(torchrun("0", "99999999999")), Says("WORLD_SIZE"));
  EXPECT_THAT(refusal(with(torchrun("0", "2"), {{"LOCAL_RANK", "5"}})), Says("LOCAL_RANK=5"));
  EXPECT_THAT(refusal(with(torchrun("0", "2"), {{"LOCAL_WORLD_SIZE", "3"}})),
              Says("LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2"));
  EXPECT_THAT(refusal(with(torchrun("0", "2"), {{"MASTER_PORT", "70000"}})),
              Says("MASTER_PORT=70000"));
  EXPECT_THAT(refusal(without(with(torchrun("0", "2"), {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
                              "MASTER_PORT")),
              Says("MASTER_PORT not set"));
  EXPECT_THAT(refusal(without(kSpawn, "TESSERA_SPAWN_SIZE")), Says("TESSERA_SPAWN_SIZE"));
}

// The variables of libgomp that a rank gets, for any setting of a user.

struct Setting {
  const char* text;  ///< null: not set
  bool counts;
};

/// The variables with `name` set to it.
void put(base::Environment& variables, const char* name, const Setting& setting) {
  if (setting.text != nullptr) variables[name] = setting.text;
}

bool says_how_threads_wait(const base::Environment& variables) {
  return std::ranges::any_of(variables, [](const auto& variable) {
    return comm::says_how_threads_wait(variable.first + "=" + variable.second);
  });
}

// Property: a setting that counts stays, one that does not is replaced, for every combination.
TEST(RankVariables, ReplaceOnlyWhatDoesNotCount) {
  const std::vector<Setting> threads{{nullptr, false}, {"", false},  {"0", false}, {" ", false},
                                     {"-2", false},    {"x", false}, {"1", true},  {"4,2", true}};
  const std::vector<Setting> waits{
      {nullptr, false}, {"", false}, {" ", false}, {"0", true}, {"active", true}};
  for (const Setting& given : threads) {
    for (const Setting& spins : waits) {
      for (const Setting& policy : waits) {
        base::Environment variables{{"PATH", "/bin"}};
        put(variables, "OMP_NUM_THREADS", given);
        put(variables, "GOMP_SPINCOUNT", spins);
        put(variables, "OMP_WAIT_POLICY", policy);
        base::Environment expected = variables;
        if (!given.counts) expected["OMP_NUM_THREADS"] = "3";
        if (!spins.counts && !policy.counts) {
          expected["GOMP_SPINCOUNT"] = std::string(kShortSpins).substr(15);
        }
        EXPECT_EQ(says_how_threads_wait(variables), spins.counts || policy.counts);
        set_thread_variables(variables, 3);
        EXPECT_EQ(variables, expected);
        EXPECT_TRUE(says_how_threads_wait(variables)) << "a rank is executed once";
      }
    }
  }
}

// A fake scontrol on PATH: what it is asked, and what becomes of every way in which it can fail.
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kList = "node[01-03,7],gpu5";
constexpr seconds kPatience{60};

class SlurmHosts : public ::testing::Test {
 protected:
  SlurmHosts() : path_(std::getenv("PATH")) {}
  ~SlurmHosts() override { ::setenv("PATH", path_.c_str(), 1); }

  /// A scontrol that runs `script`, in front of everything else on PATH.
  void answer_by(const std::string& script) {
    const auto file = folder_.write("bin/scontrol", "#!/bin/sh\n" + script);
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    ::setenv("PATH", ((folder_ / "bin").string() + ":" + path_).c_str(), 1);
  }
  static LaunchEnvironment step(const std::string& list = kList) {
    LaunchEnvironment launch;
    launch.launcher = Launcher::kSlurm;
    launch.world_size = 2;
    launch.node_list = list;
    return launch;
  }
  static std::string first_host(milliseconds limit = kPatience) {
    LaunchEnvironment launch = step();
    find_first_host(launch, limit);
    return launch.master_addr;
  }
  static std::string error(milliseconds limit = kPatience) {
    return error_of(ErrorKind::kUsage, [&] { first_host(limit); });
  }

  const TemporaryFolder folder_;
  const std::string path_;
};

TEST_F(SlurmHosts, ScontrolGetsTheListAsOneWordAndItsFirstLineIsTheAddress) {
  const std::string asked = (folder_ / "asked").string();
  answer_by("printf '<%s>' \"$@\" > " + asked + "\nprintf 'node01\\nnode02\\nnode03\\n'");
  EXPECT_EQ(first_host(), "node01");
  std::ifstream file(asked);
  std::string words;
  std::getline(file, words);
  EXPECT_EQ(words, "<show><hostnames><node[01-03,7],gpu5>") << "no shell has expanded it";
}

TEST_F(SlurmHosts, NoOneIsAskedWhereAnAddressIsGivenOrThereIsNoList) {
  answer_by("echo asked > " + (folder_ / "asked").string() + "; echo wrong");
  LaunchEnvironment given = step();
  given.master_addr = "10.0.0.1";
  find_first_host(given, kPatience);
  EXPECT_EQ(given.master_addr, "10.0.0.1");
  LaunchEnvironment none = step("");
  find_first_host(none, kPatience);
  EXPECT_EQ(none.master_addr, "");
  EXPECT_FALSE(exists(folder_ / "asked"));
}

TEST_F(SlurmHosts, WithoutScontrolTheUserIsToldWhatToSet) {
  ::setenv("PATH", folder_.path().c_str(), 1);
  EXPECT_THAT(error(), Says("no scontrol on PATH", kList, "set MASTER_ADDR or comm.master_addr"));
}

TEST_F(SlurmHosts, FailuresAreNamed) {
  answer_by("echo node01; exit 3");
  EXPECT_THAT(error(), Says("exit code 3"));
  answer_by("kill -9 $$");
  EXPECT_THAT(error(), Says("signal 9"));
  answer_by("exit 0");
  EXPECT_THAT(error(), Says("found nothing"));
}

TEST_F(SlurmHosts, WhatIsNoHostNameIsNoAddress) {
  for (const char* line : {"node01; rm -rf x", "-oProxyCommand=x", "\\033[2Jnode01", "no de", "",
                           ".node", "node/../1", "node01\\r"}) {
    answer_by(std::string("printf 'node01\\n") + line + "\\nnode02\\n'");
    EXPECT_THAT(error(), Says("expected the hosts of the step")) << line;
    answer_by(std::string("printf '") + line + "\\nnode02\\n'");
    EXPECT_THAT(error(), Says("expected the hosts of the step")) << line;
  }
  answer_by("head -c 300 /dev/zero | tr '\\0' a");
  EXPECT_LT(error().size(), 400U) << "cut";
  answer_by("printf 'a\\033[2J'");
  EXPECT_THAT(error(), Says("'a\\x1b[2J'")) << "escaped";
}

TEST_F(SlurmHosts, AFloodIsCutOff) {
  answer_by("yes node01");
  EXPECT_THAT(error(), Says("more than 1 MiB"));
}

// Each of them would otherwise hold up the run for an hour.
TEST_F(SlurmHosts, NoAnswerInTimeIsAnErrorAndNothingStays) {
  const std::string pid = (folder_ / "pid").string();
  const std::string remember = "echo $$ > " + pid + "\n";
  for (const char* script : {"sleep 3600", "echo node01; sleep 3600", "echo node01; sleep 3600 &",
                             "exec 1>&-; sleep 3600"}) {
    answer_by(remember + script);
    EXPECT_THAT(error(milliseconds(500)), Says("no answer in time")) << script;
    int process = 0;
    std::ifstream(pid) >> process;
    EXPECT_FALSE(process > 0 && std::filesystem::exists("/proc/" + std::to_string(process)))
        << script;
  }
}

TEST_F(SlurmHosts, AListThatIsAnOptionIsRefused) {
  answer_by("echo node01");
  LaunchEnvironment launch = step("--help");
  EXPECT_REFUSED(kUsage, find_first_host(launch, kPatience), "an option");
}

TEST(Address, NumbersAndLocalhostNeedNoNameService) {
  const auto four = resolve("10.1.2.3", 4711);
  ASSERT_EQ(four.size(), 1U);
  EXPECT_EQ(host_text(four[0]), "10.1.2.3");
  EXPECT_EQ(four[0].port(), 4711);
  const auto six = resolve("::1", 80);
  ASSERT_EQ(six.size(), 1U);
  EXPECT_EQ(host_text(six[0]), "::1");
  EXPECT_EQ(six[0].port(), 80);
  EXPECT_EQ(host_text(resolve("localhost", 1).at(0)), "127.0.0.1");
}

TEST(Address, UnknownNamesAreSaid) {
  // RFC 2606: never a host.
  EXPECT_REFUSED(kComm, resolve("rank0.invalid", 1), "rank0.invalid", "comm.master_addr");
}

TEST(Address, TheRouteToThisHostBeginsAtItself) {
  EXPECT_EQ(local_address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address_towards("localhost"), "127.0.0.1");
}

}  // namespace
}  // namespace tessera::comm::launch_environment_test
