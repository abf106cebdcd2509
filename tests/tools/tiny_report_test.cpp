// tools/tiny_report.py, which closes ./run.
#include <gmock/gmock.h>

#include "tools/python.h"

namespace tessera::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// As ./run calls it, from the root of a repository.
class TinyReport : public ::testing::Test {
 protected:
  TinyReport() {
    write_small_run(folder_);
    std::filesystem::rename(folder_ / "run.toml", folder_ / "tiny.toml");
    std::filesystem::create_directories(folder_ / "configs");
    std::filesystem::copy_file(TESSERA_SOURCE "/configs/tiny.expected.json",
                               folder_ / "configs/tiny.expected.json");
    std::filesystem::create_directories(folder_ / "build/release");
    std::filesystem::create_symlink(TESSERA_PROGRAM, folder_ / "build/release/tessera");
  }

  Outcome report_after(std::vector<std::string> overrides) {
    std::vector<std::string> words{"train",       "tiny.toml",         "--job.dump_folder",
                                   "outputs/run", "--validation.path", "page.txt"};
    words.insert(words.end(), overrides.begin(), overrides.end());
    const Outcome trained = run_program(folder_, words);
    EXPECT_EQ(trained.code, 0) << trained.err;
    overrides.insert(overrides.begin(), {"tiny.toml", "outputs/run"});
    return run_python(folder_, "tools/tiny_report.py", overrides);
  }

  testing::TemporaryFolder folder_;
};

// Three steps do not beat byte frequencies: exit code 3, with everything printed.
TEST_F(TinyReport, NamesTheFoldersOfTheRun) {
  const Outcome outcome = report_after({});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("generate --model outputs/run/checkpoint --prompt"));
  EXPECT_THAT(outcome.out, HasSubstr("The model goes on from"));
}

TEST_F(TinyReport, FindsMetricsAndCheckpointsThatLieElsewhere) {
  const std::string away = (folder_ / "away").string();
  const Outcome outcome =
      report_after({"--checkpoint.folder", away, "--metrics.folder", "figures"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("outputs/run/figures/"));
  EXPECT_THAT(outcome.out, HasSubstr("generate --model away --prompt"));
  EXPECT_THAT(outcome.out, HasSubstr("The model goes on from"));
  EXPECT_THAT(outcome.out, Not(HasSubstr("There is no checkpoint")));
}

TEST_F(TinyReport, SaysThatThereIsNoCheckpoint) {
  const Outcome outcome = report_after({"--checkpoint.enable", "false"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("There is no checkpoint to go on from."));
}

}  // namespace
}  // namespace tessera::cli
