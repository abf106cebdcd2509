// The start of processes of the program: how libgomp's threads wait, under any parent; their names
// in `ps`; and the number of their threads.
#include <signal.h>

#include <fstream>
#include <optional>
#include <sstream>

#include "base/threads/cores.h"
#include "cli/program.h"
#include "cli/saving_run.h"
#include "launch/rank_variables.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::program_start_test {
namespace {

std::vector<std::string> split(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, between);) parts.push_back(part);
  return parts;
}

/// The first value of a variable as the process was executed with it; "-" where it was not.
std::string variable(pid_t pid, const std::string& name) {
  for (const std::string& line : split(proc_file(pid, "environ"), '\0')) {
    if (line.starts_with(name + "=")) return line.substr(name.size() + 1);
  }
  return "-";
}

const std::string kShortSpin = std::string(comm::kShortSpins).substr(sizeof("GOMP_SPINCOUNT"));

std::string name_in_ps(pid_t pid) { return split(proc_file(pid, "comm"), '\n').at(0); }

/// A run that does not end by itself, in a folder whose name wants quoting.
struct LongRun {
  LongRun(Starter starter, int ranks, const Variables& variables) {
    words = started_by(starter, ranks,
                       {"train", "run.toml", "--job.dump_folder", "a run's \"föld er\" $HOME",
                        "--training.steps", "1000000", "--metrics.log_freq", "100000"});
    process.emplace(folder.path(), words, variables);
  }
  /// Once it trains: which process is which rank.
  std::map<int, pid_t> ranks(std::size_t count) {
    const auto metrics = folder / "a run's \"föld er\" $HOME/metrics/metrics.jsonl";
    EXPECT_TRUE(wait_until(kLong, [&] {
      return !read_so_far(metrics).empty() || !alive(process->pid());
    })) << process->err();
    if (count > 1) return process->wait_for_ranks(count);
    return {{0, process->pid()}};
  }
  void end() {
    ::kill(process->pid(), SIGTERM);
    EXPECT_EQ(process->wait(kLong), 0) << process->err();
  }

  SmallRun folder;
  Words words;
  std::optional<Process> process;
};

/// The spins of libgomp's threads, as libgomp itself says them: once for each process. It writes
/// name and value at once, but several ranks may write into one line.
std::vector<std::string> spins_in(const std::string& said) {
  const std::string name = "GOMP_SPINCOUNT = '";
  std::vector<std::string> spins;
  for (auto at = said.find(name); at != std::string::npos; at = said.find(name, at + 1)) {
    spins.push_back(split(said.substr(at + name.size()), '\'').at(0));
  }
  return spins;
}

struct Waits {
  std::string variables, spins;
};

// Property: with every setting of the two variables libgomp spins shortly exactly where both are
// unset or blank; values that are set stay. Naive: the variable is set in main(), which libgomp
// does not read.
TEST(ProgramStart, LibgompSpinsShortlyWhereNoOneSaidHowThreadsWait) {
  const TemporaryFolder folder;
  for (const Waits& set :
       std::vector<Waits>{{"GOMP_SPINCOUNT= OMP_WAIT_POLICY=", kShortSpin},
                          {"GOMP_SPINCOUNT=' ' OMP_WAIT_POLICY=", kShortSpin},
                          {"GOMP_SPINCOUNT=7 OMP_WAIT_POLICY=", "7"},
                          {"GOMP_SPINCOUNT= OMP_WAIT_POLICY=active", "30000000000"}}) {
    const auto outcome =
        succeeded(run_program(folder, {"--version"}, "OMP_DISPLAY_ENV=verbose " + set.variables));
    EXPECT_THAT(spins_in(outcome.err), ElementsAre(set.spins)) << set.variables;
  }
}

TEST(ProgramStart, RanksOfOwnSpawnGetTheirVariablesFromTheirParent) {
  LongRun run(Starter::kOwnSpawn, 2,
              {{"TESSERA_TORCH_OF_PYTHON", "as the wheel's command sets it"}});
  for (const auto& [rank, pid] : run.ranks(2)) {
    EXPECT_EQ(variable(pid, "GOMP_SPINCOUNT"), kShortSpin);
    EXPECT_EQ(variable(pid, "TESSERA_TORCH_OF_PYTHON"), "-") << "it is the loader's alone";
    EXPECT_EQ(name_in_ps(pid), "tessera:" + std::to_string(rank));
    EXPECT_EQ(split(proc_file(pid, "cmdline"), '\0'), run.words);
  }
  EXPECT_EQ(name_in_ps(run.process->pid()), "tessera");
  run.end();
}

// As a service that ignores SIGCHLD starts it. Naive: it waits for ever for ranks that have ended.
TEST(ProgramStart, WithSigchldIgnoredItEndsAsItsRanksDo) {
  const SmallRun folder;
  const auto code_of = [&](const std::vector<std::string>& more) {
    Process process(folder.path(), joined({"env", "--ignore-signal=CHLD", TESSERA_PROGRAM, "train",
                                           "run.toml", "--nproc", "2"},
                                          more));
    return std::pair(process.wait(kLong), process.err());
  };
  const auto [trained, said] = code_of({"--training.steps", "1"});
  EXPECT_EQ(trained, 0) << said;
  const auto [refused, why] = code_of({"--data.path", "absent"});
  EXPECT_EQ(refused, 2) << why;
  EXPECT_THAT(why, Says("absent"));
}

// Naive: c10d asks for a connection without a descriptor until its timeout of minutes.
TEST(ProgramStart, ALimitOfOpenFilesThatIsTooLowForRanksIsNamed) {
  const SmallRun folder;
  for (const int limit : {20, 32}) {
    const auto outcome =
        run_program(folder, {"train", "run.toml", "--nproc", "2", "--training.steps", "1"},
                    concat("sh -c 'ulimit -n ", limit, " && exec \"$@\"' -"));
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_THAT(outcome.err,
                Says(concat("open files: found a limit of ", limit, ", expected "), "(ulimit -n)"));
  }
}

TEST(ProgramStart, RanksOfAnotherLauncherSpinShortlyToo) {
  LongRun run(Starter::kSlurm, 2, {{"OMP_DISPLAY_ENV", "verbose"}});
  const auto ranks = run.ranks(2);
  ASSERT_EQ(ranks.size(), 2U);
  EXPECT_THAT(spins_in(run.process->err()), ElementsAre(kShortSpin, kShortSpin));
  for (const auto& [rank, pid] : ranks) {
    EXPECT_EQ(name_in_ps(pid), "tessera:" + std::to_string(rank));
  }
  for (const auto& [rank, pid] : ranks) ::kill(pid, SIGTERM);
  EXPECT_EQ(run.process->wait(kLong), 0) << run.process->err();
}

// Naive: an iterator throws the error of such a read, and the test ends for another reason than its
// own.
TEST(ProcessFiles, AreEmptyOnceTheProcessHasEnded) {
  for (const std::string name : {"stat", "cmdline", "environ", "status", "comm", "children"}) {
    const TemporaryFolder folder;
    Process process(folder.path(), {"sleep", "3600"});
    const std::string own = "/proc/" + std::to_string(process.pid()) + "/";
    const std::string task = own + "task/" + std::to_string(process.pid()) + "/";
    std::ifstream file((name == "children" ? task : own) + name);
    ASSERT_TRUE(file.is_open()) << name;
    ::kill(process.pid(), SIGKILL);
    ASSERT_EQ(process.wait(kLong), 128 + SIGKILL);
    EXPECT_EQ(text_of(file), "") << name;
    EXPECT_EQ(proc_file(process.pid(), name), "") << name;
    EXPECT_FALSE(alive(process.pid()));
  }
}

/// "2 threads a rank" of the banner.
std::string threads_of(const std::string& ranks, const std::string& environment) {
  const SmallRun folder;
  const Outcome outcome = succeeded(run_program(
      folder, {"train", "run.toml", "--nproc", ranks, "--training.steps", "1"}, environment));
  const auto device = lines_with(outcome.err, " device ");
  EXPECT_EQ(device.size(), 1U) << outcome.err;
  return device.empty() ? "" : device[0].substr(device[0].rfind(',') + 2);
}

// Naive: a variable that is set counts with any value, and each rank takes all cores.
TEST(ProgramStart, AnOmpNumThreadsThatLibgompIgnoresCountsAsNotSet) {
  const std::string alone = threads_of("1", "OMP_NUM_THREADS=");
  const std::string shared = threads_of("2", "env -u OMP_NUM_THREADS");
  for (const std::string text : {"", "0", "' -1'"}) {
    EXPECT_EQ(threads_of("2", "OMP_NUM_THREADS=" + text), shared) << text;
  }
  if (base::usable_cores() > 1) {
    EXPECT_NE(alone, shared) << "all cores are one rank's alone";
    EXPECT_EQ(threads_of("2", "OMP_NUM_THREADS=2"), "2 threads a rank") << "a number stays";
  }
}

}  // namespace
}  // namespace tessera::cli::program_start_test
