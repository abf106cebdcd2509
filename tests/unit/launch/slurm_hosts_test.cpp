// A fake scontrol on PATH: what it is asked, and what becomes of every way in which it can fail.
#include <gmock/gmock.h>

#include <cstdlib>

#include "launch/hosts.h"
#include "launch/launch_environment.h"
#include "unit/io/temporary_folder.h"

namespace tessera::comm::slurm_hosts_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
    return testing::error_of(ErrorKind::kUsage, [&] { first_host(limit); });
  }

  const testing::TemporaryFolder folder_;
  const std::string path_;
};

TEST_F(SlurmHosts, ScontrolGetsTheListAsOneWordAndItsFirstLineIsTheAddress) {
  const std::string asked = (folder_ / "asked").string();
  answer_by("printf '<%s>' \"$@\" > " + asked + "\nprintf 'node01\\nnode02\\nnode03\\n'");
  EXPECT_EQ(first_host(), "node01");
  std::ifstream file(asked);
  std::string words;
  std::getline(file, words);
  EXPECT_EQ(words, "<show><hostnames><node[01-03,7],gpu5>") << "no shell has touched it";
}

TEST_F(SlurmHosts, NobodyIsAskedWhereAnAddressIsGivenOrThereIsNoList) {
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
  EXPECT_THAT(error(), AllOf(HasSubstr("no scontrol on PATH"), HasSubstr(kList),
                             HasSubstr("set MASTER_ADDR or comm.master_addr")));
}

TEST_F(SlurmHosts, FailuresAreNamed) {
  answer_by("echo node01; exit 3");
  EXPECT_THAT(error(), HasSubstr("exit code 3"));
  answer_by("kill -9 $$");
  EXPECT_THAT(error(), HasSubstr("signal 9"));
  answer_by("exit 0");
  EXPECT_THAT(error(), HasSubstr("found nothing"));
}

TEST_F(SlurmHosts, WhatIsNoHostNameIsNoAddress) {
  for (const char* line : {"node01; rm -rf x", "-oProxyCommand=x", "\\033[2Jnode01", "no de", "",
                           ".node", "node/../1", "node01\\r"}) {
    answer_by(std::string("printf 'node01\\n") + line + "\\nnode02\\n'");
    EXPECT_THAT(error(), HasSubstr("expected the hosts of the step")) << line;
    answer_by(std::string("printf '") + line + "\\nnode02\\n'");
    EXPECT_THAT(error(), HasSubstr("expected the hosts of the step")) << line;
  }
  answer_by("head -c 300 /dev/zero | tr '\\0' a");
  EXPECT_LT(error().size(), 400U) << "cut";
  answer_by("printf 'a\\033[2J'");
  EXPECT_THAT(error(), HasSubstr("'a\\x1b[2J'")) << "escaped";
}

TEST_F(SlurmHosts, AFloodIsCutOff) {
  answer_by("yes node01");
  EXPECT_THAT(error(), HasSubstr("more than 1 MiB"));
}

// Each of them would otherwise hold up the run for an hour.
TEST_F(SlurmHosts, NoAnswerInTimeIsAnErrorAndNothingStays) {
  const std::string pid = (folder_ / "pid").string();
  const std::string remember = "echo $$ > " + pid + "\n";
  for (const char* script : {"sleep 3600", "echo node01; sleep 3600", "echo node01; sleep 3600 &",
                             "exec 1>&-; sleep 3600"}) {
    answer_by(remember + script);
    EXPECT_THAT(error(milliseconds(500)), HasSubstr("no answer in time")) << script;
    int process = 0;
    std::ifstream(pid) >> process;
    EXPECT_FALSE(process > 0 && std::filesystem::exists("/proc/" + std::to_string(process)))
        << script;
  }
}

TEST_F(SlurmHosts, AListThatIsAnOptionIsRefused) {
  answer_by("echo node01");
  LaunchEnvironment launch = step("--help");
  EXPECT_THAT(testing::error_of(ErrorKind::kUsage, [&] { find_first_host(launch, kPatience); }),
              HasSubstr("an option"));
}

}  // namespace
}  // namespace tessera::comm::slurm_hosts_test
