// Whose a run's folder is: one run at a time, and the attempts of a launcher that restarts it.
#include <signal.h>

#include "cli/program.h"
#include "cli/same_bits.h"
#include "io/folder.h"
#include "support/free_port.h"
#include "support/process.h"
#include "support/test.h"

namespace tessera::cli::run_folder_test {
namespace {

namespace fs = std::filesystem;
using std::chrono::minutes;

constexpr minutes kPatience{2};

Words train(int steps, const Words& more = {}) {
  return joined({"train", "run.toml", "--training.steps", std::to_string(steps),
                 "--metrics.log_freq", "1000000", "--checkpoint.interval", "20"},
                more);
}

Words on_two_ranks(int steps, const Words& more = {}) {
  return started_by(Starter::kOwnSpawn, 2, train(steps, more));
}

class RunFolder : public ::testing::Test {
 protected:
  void wait_for_steps(const std::string& run, std::size_t steps) const {
    ASSERT_TRUE(wait_until(minutes(1), [&] { return losses(folder_ / run).size() >= steps; }));
  }
  /// Each program's output goes to a folder of its own; paths are absolute.
  Process elsewhere(const std::string& name, const Words& words) const {
    const TemporaryFolder& folder = folder_;
    fs::create_directories(folder / name);
    for (const auto* file : {"run.toml", "model.json", "page.txt"}) {
      fs::copy_file(folder / file, folder / name / file, fs::copy_options::overwrite_existing);
    }
    return Process(folder / name, words);
  }

  const SmallRun folder_;
};

TEST_F(RunFolder, OfARunIsRefusedToAnotherUntilThatIsGone) {
  const std::string run = (folder_ / "run").string();
  std::map<int, pid_t> ranks;
  {
    Process first(folder_.path(), on_two_ranks(1'000'000, {"--job.dump_folder", run}));
    wait_for_steps("run", 30);
    ranks = first.wait_for_ranks(2);
    ASSERT_EQ(ranks.size(), 2U);
    auto second = elsewhere("second", on_two_ranks(40, {"--job.dump_folder", run}));
    EXPECT_EQ(second.wait(kPatience), 2) << second.err();
    EXPECT_THAT(second.last_error_line(), Says("'" + run + "': found in use by process " +
                                                   std::to_string(ranks.at(0)) + " on ",
                                               "set another job.dump_folder"));
    // The first one's files are as they were: it continues to write them.
    const auto steps = losses(folder_ / "run").size();
    wait_for_steps("run", steps + 5);
    ::kill(first.pid(), SIGKILL);
    EXPECT_EQ(first.wait(kPatience), 128 + SIGKILL);
  }
  // At once, without waiting for the ranks: they are ending.
  const auto latest = store_of(folder_, "run").latest();
  ASSERT_TRUE(latest.has_value());
  const int steps = static_cast<int>(*latest) + 5;
  auto third = elsewhere("third", on_two_ranks(steps, {"--job.dump_folder", run}));
  EXPECT_EQ(third.wait(kPatience), 0) << third.err();
  EXPECT_EQ(losses(folder_ / "run").size(), static_cast<std::size_t>(steps));
}

TEST_F(RunFolder, FoldersElsewhereAreOneRunsToo) {
  for (const std::string key : {"checkpoint.folder", "metrics.folder"}) {
    const std::string shared = (folder_ / ("shared-" + key)).string();
    fs::create_directories(shared);
    Words words = train(2, {"--job.dump_folder", "run-" + key, "--" + key, shared});
    words.insert(words.begin(), TESSERA_PROGRAM);
    {
      const FolderLock other_run(shared, std::chrono::milliseconds(0), "");
      Process refused(folder_.path(), words);
      EXPECT_EQ(refused.wait(kPatience), 2);
      EXPECT_THAT(refused.last_error_line(),
                  Says("'" + shared + "': found in use by process ", "set another " + key));
    }
    Process taken(folder_.path(), words);
    EXPECT_EQ(taken.wait(kPatience), 0) << taken.err();
  }
}

TEST_F(RunFolder, FoldersInsideARunAreItsOwnToo) {
  Process first(folder_.path(), on_two_ranks(1'000'000, {"--job.dump_folder", "run"}));
  wait_for_steps("run", 30);
  for (const std::string name : {"checkpoint", "metrics"}) {
    const std::string inside = (folder_ / "run" / name).string();
    auto second = elsewhere("second", on_two_ranks(40, {"--" + name + ".folder", inside}));
    EXPECT_EQ(second.wait(kPatience), 2) << second.err();
    EXPECT_THAT(second.last_error_line(),
                Says("'" + inside + "': found in use by", "set another " + name + ".folder"));
  }
  const auto steps = losses(folder_ / "run").size();
  wait_for_steps("run", steps + 5);
  ::kill(first.pid(), SIGTERM);
  EXPECT_EQ(first.wait(kPatience), 0) << first.err();
}

class EndedRun : public RunFolder {
 protected:
  void SetUp() override {
    RunFolder::SetUp();
    succeeded(run_program(folder_, run(3)));
  }
  static Words run(int steps, Words more = {}) {
    more.insert(more.end(), {"--job.dump_folder", "run"});
    return train(steps, more);
  }
};

TEST_F(EndedRun, IsNotOverwrittenByOneWithoutCheckpoints) {
  const auto metrics = read_file(folder_ / "run/metrics/metrics.jsonl");
  const auto config = read_file(folder_ / "run/config.toml");
  EXPECT_THAT(run_program(folder_, run(1, {"--checkpoint.enable", "false"})),
              Exits(2,
                    "checkpoint.enable: found false and '" +
                        (folder_ / "run/checkpoint/step-3").string() + "'",
                    "another job.dump_folder or checkpoint.folder"));
  EXPECT_EQ(read_file(folder_ / "run/metrics/metrics.jsonl"), metrics);
  EXPECT_EQ(read_file(folder_ / "run/config.toml"), config);
}

TEST_F(EndedRun, SaysThatNothingIsLeftToDo) {
  const auto metrics = read_file(folder_ / "run/metrics/metrics.jsonl");
  const auto config = read_file(folder_ / "run/config.toml");
  for (const int steps : {2, 3}) {
    const auto outcome = succeeded(run_program(folder_, run(steps, {"--optimizer.lr", "7"})));
    EXPECT_THAT(outcome.err, Says("step 3 is done already and training.steps is " +
                                  std::to_string(steps) + ": nothing is left to do"));
    EXPECT_EQ(read_file(folder_ / "run/metrics/metrics.jsonl"), metrics);
    EXPECT_EQ(read_file(folder_ / "run/config.toml"), config) << "that of what was trained";
  }
}

TEST_F(EndedRun, IsNotConvertedIntoItsOwnCheckpoint) {
  for (const std::string source : {"run/checkpoint", "run/checkpoint/step-3"}) {
    EXPECT_THAT(run_program(folder_, {"convert", source, "run/checkpoint/step-3/a/b"}),
                Exits(2, "inside the checkpoint"));
    EXPECT_FALSE(fs::exists(folder_ / "run/checkpoint/step-3/a"));
  }
  for (const std::string out : {"run/converted", "run/checkpoint/converted", "exports/step-4"}) {
    succeeded(run_program(folder_, {"convert", "run/checkpoint", out}));
  }
}

// Naive: it is written, stops the next resume where it is the newest, and a save of its step
// removes it silently.
TEST_F(EndedRun, IsNotConvertedIntoTheNameOfAnotherStep) {
  for (const std::string out : {"step-4", "step-4/inside", "step-4.tmp", "latest"}) {
    const auto outcome =
        run_program(folder_, {"convert", "run/checkpoint", "run/checkpoint/" + out});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_THAT(outcome.err,
                Says((folder_ / ("run/checkpoint/" + out.substr(0, out.find('/')))).string() +
                         "', a name that a run gives its checkpoints",
                     (folder_ / "run/converted-").string()));
  }
  EXPECT_FALSE(fs::exists(folder_ / "run/checkpoint/step-4"));
  EXPECT_FALSE(fs::exists(folder_ / "run/checkpoint/step-4.tmp"));
  EXPECT_EQ(read_file(folder_ / "run/checkpoint/latest"), "step-3");
}

// As it happens: torchrun notices, ends the other rank and starts both again; no folder is named.
TEST_F(RunFolder, TorchrunsNextAttemptResumesToTheBitsOfTheUndisturbedRun) {
  if (const auto why = why_not(Starter::kTorchrun); !why.empty()) GTEST_SKIP() << why;
  constexpr int kSteps = 500;
  Process whole(folder_.path(), on_two_ranks(kSteps, {"--job.dump_folder", "whole"}));
  ASSERT_EQ(whole.wait(kPatience), 0) << whole.err();

  auto words = started_by(Starter::kTorchrun, 2, train(kSteps));
  words.insert(std::find(words.begin(), words.end(), "--standalone"), {"--max-restarts", "1"});
  Process restarted(folder_.path(), words);
  std::string run;
  const auto has_checkpoint = [&] {
    if (!fs::exists(folder_ / "outputs")) return false;
    for (const auto& entry : fs::directory_iterator(folder_ / "outputs")) {
      const std::string name = entry.path().filename();
      if (name != ".restarts") run = "outputs/" + name;
    }
    return !run.empty() && store_of(folder_, run).latest().has_value();
  };
  ASSERT_TRUE(wait_until(minutes(1), has_checkpoint)) << restarted.err();
  const auto ranks = restarted.wait_for_ranks(2);
  ASSERT_EQ(ranks.size(), 2U);
  ::kill(ranks.at(1), SIGKILL);
  ASSERT_EQ(restarted.wait(kPatience), 0) << restarted.err();

  const std::string err = restarted.err();
  EXPECT_THAT(err, Says("resumed from"));
  EXPECT_EQ(lines_with(err, "run folder").size(), 2U) << "two attempts\n" << err;
  std::size_t runs = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "outputs")) {
    runs += entry.path().filename() == ".restarts" ? 0U : 1U;
  }
  EXPECT_EQ(runs, 1U);
  EXPECT_EQ(losses(folder_ / run), losses(folder_ / "whole"));
  EXPECT_EQ(losses(folder_ / run).size(), static_cast<std::size_t>(kSteps));
  expect_same_bits(store_of(folder_, run), store_of(folder_, "whole"), kSteps);
}

/// Returns the variables that torchrun sets for one attempt at a job.
std::string attempt_of(const std::string& job, int number) {
  static const std::string port = std::to_string(free_port());
  return "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port +
         " TORCHELASTIC_RUN_ID=" + job + " TORCHELASTIC_RESTART_COUNT=" + std::to_string(number);
}

// No folder is named.
TEST(RestartedRun, ContinuesInTheFolderOfTheAttemptBefore) {
  const SmallRun folder;
  const auto attempt = [&](const std::string& run_id, int number, int steps) {
    return succeeded(run_program(folder,
                                 {"train", "run.toml", "--training.steps", std::to_string(steps)},
                                 attempt_of(run_id, number)))
        .err;
  };
  const auto runs = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder / "outputs")) {
      if (entry.path().filename() != ".restarts") names.push_back(entry.path().filename());
    }
    return names;
  };
  attempt("a", 0, 2);
  EXPECT_THAT(attempt("a", 1, 3), Says("resumed from"));
  ASSERT_EQ(runs().size(), 1U);
  EXPECT_EQ(losses(folder / "outputs" / runs().front()).size(), 3U);
  attempt("a", 0, 2);  // another job of that name
  attempt("b", 0, 2);
  EXPECT_EQ(runs().size(), 3U);
  EXPECT_THAT(attempt("c", 1, 2), Says("set job.dump_folder"));
}

// Else the next attempt would start a new run, hours later.
TEST(RestartedRun, IsRefusedWhereItsFolderCannotBeNoted) {
  const SmallRun folder;
  const auto first_attempt = [&] {
    return run_program(folder, {"train", "run.toml"}, attempt_of("a", 0));
  };
  ASSERT_EQ(first_attempt().code, 0);
  const fs::path note = fs::directory_iterator(folder / "outputs/.restarts")->path();
  fs::remove(note);
  fs::create_directory(note);
  EXPECT_THAT(first_attempt(), Exits(2, "outputs/.restarts/" + note.filename().string()));
}

// load_step is for the first attempt that comes so far; what another job left does not count.
TEST(RestartedRun, LoadStepIsForTheFirstAttempt) {
  const SmallRun folder;
  const auto attempt = [&](const std::string& job, int number, int load_step, int steps) {
    return run_program(folder,
                       {"train", "run.toml", "--job.dump_folder", "run", "--checkpoint.interval",
                        "1", "--training.steps", std::to_string(steps), "--checkpoint.load_step",
                        std::to_string(load_step)},
                       attempt_of(job, number));
  };
  const auto expect_resumed = [&](const Outcome& outcome, const std::string& step) {
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(outcome.err, Says("run/checkpoint/" + step + ", written by"));
  };
  EXPECT_EQ(attempt("a", 0, 0, 2).code, 0);
  expect_resumed(attempt("a", 1, 0, 4), "step-2");
  expect_resumed(attempt("a", 2, 0, 5), "step-4");
  // Attempt 0 of another job was refused: its restarts are too.
  for (const int number : {0, 1}) {
    EXPECT_THAT(attempt("b", number, 0, 6), Exits(2, "checkpoint.load_step: found 0 and "));
  }
  // Its first attempt never came so far: the second one still goes back.
  expect_resumed(attempt("c", 1, 2, 4), "step-2");
  expect_resumed(attempt("c", 2, 2, 6), "step-4");
  expect_resumed(attempt("c", 3, 3, 4), "step-3");
  expect_resumed(attempt("d", 1, 3, 4), "step-3");
  expect_resumed(attempt("d", 0, 3, 4), "step-3");
  expect_resumed(attempt("d", 1, 3, 5), "step-4");
}

}  // namespace
}  // namespace tessera::cli::run_folder_test
