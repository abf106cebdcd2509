// The program as ranks of own spawn, of torchrun and of Open MPI: the same numbers, errors said
// once, lost ranks named, nothing that listens beyond this host.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <iomanip>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/process.h"
#include "cli/program.h"
#include "comm/listener.h"

namespace tessera::cli {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr seconds kPatience{120};  // for a run that is to end by itself
constexpr seconds kGone{10};

/// run.toml: a tiny Qwen3 of transformers' and its batches, one a step.
void write_golden_run(const testing::TemporaryFolder& folder) {
  const std::string data = TESSERA_TEST_DATA "/qwen3-fp32";
  folder.write("run.toml", "[model]\npath = \"" + data + "\"\n[data]\npath = \"" + data +
                               "/reference.safetensors\"\n[training]\nsteps = 6\n[precision]\n"
                               "param_dtype = \"float32\"\n[optimizer]\nlr = 0.001\n[job]\n"
                               "dump_folder = \"run\"\n");
}

std::filesystem::path metrics_of(const testing::TemporaryFolder& folder) {
  return folder / "run/metrics/metrics.jsonl";
}

/// Loss and norm of every step; the file has them with all their digits.
std::vector<std::pair<double, double>> losses_and_norms(const testing::TemporaryFolder& folder) {
  std::vector<std::pair<double, double>> steps;
  std::istringstream text(read_file(metrics_of(folder)));
  for (std::string line; std::getline(text, line);) {
    const auto step = nlohmann::json::parse(line);
    steps.emplace_back(step.at("loss").get<double>(), step.at("grad_norm").get<double>());
  }
  return steps;
}

double peak_rss_mib(const testing::TemporaryFolder& folder) {
  const auto lines = lines_with(read_file(metrics_of(folder)), "peak_rss_mib");
  return nlohmann::json::parse(lines.back()).at("peak_rss_mib").get<double>();
}

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
    EXPECT_TRUE(wait_until(seconds(120), [&] { return !read_file(metrics_of(folder_)).empty(); }))
        << process.err();
  }
  /// torchrun has one code for all failures, and a report of its own.
  void expect_exit_code(int found, int expected) const {
    if (GetParam() != Starter::kTorchrun) {
      EXPECT_EQ(found, expected) << err_;
      return;
    }
    EXPECT_EQ(found, 1);
    EXPECT_THAT(err_, HasSubstr("(exitcode: " + std::to_string(expected) + ")"));
  }
  Words endless(int ranks) const {
    return command(ranks, {"train", "run.toml", "--training.steps", "1000000", "--metrics.log_freq",
                           "1000000"});
  }

  const testing::TemporaryFolder folder_;
  std::string err_;
};

class OtherLaunchers : public Launchers {};

TEST_P(OtherLaunchers, TrainTheSameBitsAsOwnSpawn) {
  const testing::TemporaryFolder spawned;
  write_golden_run(spawned);
  Process own(spawned.path(), started_by(Starter::kOwnSpawn, 2, {"train", "run.toml"}));
  ASSERT_EQ(own.wait(kPatience), 0) << own.err();
  ASSERT_EQ(run(command(2, {"train", "run.toml"})), 0) << err_;
  const auto expected = losses_and_norms(spawned);
  EXPECT_EQ(expected.size(), 6U);
  EXPECT_EQ(losses_and_norms(folder_), expected);
  // A launcher's own memory (torchrun is a Python with torch: twice ours) is not the ranks'.
  const double peak = peak_rss_mib(spawned);
  EXPECT_NEAR(peak_rss_mib(folder_), peak, 0.25 * peak);
}

TEST_P(OtherLaunchers, AnotherNprocIsRefusedOnce) {
  expect_exit_code(run(command(2, {"train", "run.toml", "--nproc", "3"})), 2);
  EXPECT_EQ(lines_with(err_, "tessera: usage: --nproc: found 3, expected 2, the ranks that").size(),
            1U)
      << err_;
}

TEST_P(OtherLaunchers, TheSameNprocIsAccepted) {
  EXPECT_EQ(run(command(2, {"train", "run.toml", "--nproc", "2", "--training.steps", "1"})), 0)
      << err_;
}

// Before there is a World, and after: each rank finds the error for itself.
TEST_P(OtherLaunchers, WhatAllRanksRefuseIsSaidOnce) {
  expect_exit_code(run(command(3, {"train", "run.toml", "--training.stpes", "3"})), 2);
  EXPECT_EQ(lines_with(err_, "unknown key").size(), 1U) << err_;
  expect_exit_code(run(command(3, {"train", "run.toml", "--model.path", "absent"})), 2);
  EXPECT_EQ(lines_with(err_, "absent").size(), 1U) << err_;
}

TEST_P(OtherLaunchers, ALostRankIsNamedByEveryOther) {
  constexpr int kRanks = 3;
  for (int victim = 0; victim < kRanks; ++victim) {
    SCOPED_TRACE("rank " + std::to_string(victim) + " is killed");
    std::filesystem::remove_all(folder_ / "run");
    Process process(folder_.path(), endless(kRanks));
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
      if (rank == victim) continue;
      // Not what the launcher passed on: it may end before it has read everything.
      const std::string log = read_file(folder_ / log_of(rank));
      EXPECT_FALSE(lines_with(log, "rank " + std::to_string(victim)).empty())
          << "rank " << rank << " says: " << log << process.err();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Program, OtherLaunchers,
                         ::testing::Values(Starter::kTorchrun, Starter::kOpenMpi), starter_name);

class OpenMpi : public Launchers {};

TEST_P(OpenMpi, ARankThatIsRefusedAloneSaysSoAndEndsTheOthers) {
  Words words = command(1, {"train", "run.toml"});
  words.insert(words.end(), {":", "-np", "1", TESSERA_PROGRAM, "train", "absent.toml"});
  EXPECT_EQ(run(words), 2) << err_;
  EXPECT_EQ(lines_with(err_, "absent.toml").size(), 1U) << err_;
}

TEST_P(OpenMpi, APortInUseIsAFailureThatNamesIt) {
  const comm::Listener taken = comm::listen_on("127.0.0.1", 0);
  const std::string port = std::to_string(taken.port);
  // 0.0.0.0 stands for an address of the network, at which libtorch opens the port.
  for (const std::string host : {"127.0.0.1", "0.0.0.0"}) {
    const Variables address{{"MASTER_ADDR", host}, {"MASTER_PORT", port}};
    EXPECT_EQ(run(command(2, {"train", "run.toml"}), address), 1) << err_;
    EXPECT_EQ(lines_with(err_, "rank 0: store: found port " + port + " of " + host +
                                   " in use, expected a free one")
                  .size(),
              1U)
        << err_;
  }
}

INSTANTIATE_TEST_SUITE_P(Program, OpenMpi, ::testing::Values(Starter::kOpenMpi), starter_name);

/// Local addresses of the TCP sockets on which a process listens, as the kernel writes them.
std::vector<std::string> listening_addresses(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  std::set<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator(proc + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  std::vector<std::string> addresses;
  for (const char* table : {"/net/tcp", "/net/tcp6"}) {
    std::istringstream rows(read_file(proc + table));
    for (std::string row; std::getline(rows, row);) {
      // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
      std::istringstream row_words(row);
      std::vector<std::string> fields{std::istream_iterator<std::string>(row_words), {}};
      constexpr const char* kListening = "0A";
      if (fields.size() < 10 || fields[3] != kListening || !inodes.contains(fields[9])) continue;
      addresses.push_back(fields[1].substr(0, fields[1].find(':')));
    }
  }
  return addresses;
}

TEST_P(Launchers, RanksListenOnLoopbackOnly) {
  // In the kernel's table an address is a number of this machine's byte order.
  std::ostringstream loopback;
  loopback << std::hex << std::uppercase << std::setw(8) << std::setfill('0')
           << htonl(INADDR_LOOPBACK);
  Process process(folder_.path(), endless(2));
  const auto ranks = process.wait_for_ranks(2);
  ASSERT_EQ(ranks.size(), 2U) << process.err();
  wait_for_steps(process);
  for (const auto& [rank, pid] : ranks) {
    const auto addresses = listening_addresses(pid);
    EXPECT_FALSE(addresses.empty()) << "Gloo listens for the other rank";
    for (const std::string& address : addresses) EXPECT_EQ(address, loopback.str());
  }
}

INSTANTIATE_TEST_SUITE_P(Program, Launchers,
                         ::testing::Values(Starter::kOwnSpawn, Starter::kTorchrun,
                                           Starter::kOpenMpi),
                         starter_name);

}  // namespace
}  // namespace tessera::cli
