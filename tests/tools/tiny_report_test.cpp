// tools/tiny_report.py, which closes ./run.

#include "support/test.h"
#include "tools/python.h"

namespace tessera::cli::tiny_report_test {
namespace {

/// A line of metrics.jsonl; the losses as JSON has them.
std::string metrics_line(int step, const std::string& loss, const std::string& held_out = "") {
  return R"({"step":)" + std::to_string(step) + R"(,"loss":)" + loss +
         R"(,"step_ms":1000.0,"peak_rss_mib":1.0)" +
         (held_out.empty() ? "" : R"(,"val_loss":)" + held_out) + "}\n";
}

/// The lines of a report that are the plot.
std::string plot_of(const std::string& report) {
  const std::string end = "  step\n";
  const std::size_t from = report.find("nats a byte: ");
  const std::size_t to = report.find(end, from);
  if (from == std::string::npos || to == std::string::npos) return "no plot in " + report;
  return report.substr(from, to + end.size() - from);
}

/// As ./run calls it, from the root of a repository.
class TinyReport : public ::testing::Test {
 protected:
  TinyReport() {
    std::filesystem::rename(folder_ / "run.toml", folder_ / "tiny.toml");
    std::filesystem::create_directories(folder_ / "configs");
    std::filesystem::copy_file(TESSERA_SOURCE "/configs/tiny.expected.json",
                               folder_ / "configs/tiny.expected.json");
    std::filesystem::create_directories(folder_ / "build/release");
    std::filesystem::create_symlink(TESSERA_PROGRAM, folder_ / "build/release/tessera");
  }

  Outcome report_after(std::vector<std::string> overrides) {
    succeeded(run_program(folder_, joined({"train", "tiny.toml", "--job.dump_folder", "outputs/run",
                                           "--validation.path", "page.txt"},
                                          overrides)));
    overrides.insert(overrides.begin(), {"tiny.toml", "outputs/run"});
    return run_python(folder_, "tools/tiny_report.py", overrides);
  }

  /// Reports a run of these metrics alone. Byte frequencies alone have a loss of 2.839 there.
  Outcome report_of(const std::string& metrics) {
    folder_.write("outputs/run/metrics/metrics.jsonl", metrics);
    folder_.write("outputs/run/config.toml", R"(training.steps = 3
data.path = "page.txt"
validation.path = "page.txt"
metrics.folder = "outputs/run/metrics"
checkpoint.folder = "outputs/run/checkpoint"
)");
    const Outcome outcome =
        run_python(folder_, "tools/tiny_report.py", {"tiny.toml", "outputs/run"});
    EXPECT_EQ(outcome.err, "");
    return outcome;
  }

  SmallRun folder_;
};

// Three steps do not beat byte frequencies: exit code 3, with everything printed.
TEST_F(TinyReport, NamesTheFoldersOfTheRun) {
  const Outcome outcome = report_after({});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(plot_of(outcome.out), Says("* training (mean of a column)   o held-out\n"));
  EXPECT_THAT(outcome.out,
              Says("generate --model outputs/run/checkpoint --prompt", "The model continues"));
}

TEST_F(TinyReport, FindsMetricsAndCheckpointsThatLieElsewhere) {
  const std::string away = (folder_ / "away").string();
  const Outcome outcome =
      report_after({"--checkpoint.folder", away, "--metrics.folder", "figures"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, Says("outputs/run/figures/", "generate --model away --prompt",
                                "The model continues"));
  EXPECT_THAT(outcome.out, Not(Says("There is no checkpoint")));
}

TEST_F(TinyReport, SaysThatThereIsNoCheckpoint) {
  const Outcome outcome = report_after({"--checkpoint.enable", "false"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, Says("There is no checkpoint to continue from."));
}

TEST_F(TinyReport, DrawsTheLossesByStep) {
  const Outcome outcome =
      report_of(metrics_line(1, "5.5") + metrics_line(2, "4.5") + metrics_line(3, "3.5", "4.0") +
                metrics_line(4, "3.25") + metrics_line(5, "2.75") + metrics_line(6, "2.5", "2.75") +
                metrics_line(7, "2.25") + metrics_line(8, "2.25") + metrics_line(9, "2.0", "2.25"));
  EXPECT_EQ(plot_of(outcome.out),
            R"(nats a byte:  . byte frequencies   * training (mean of a column)   o held-out
5.50 |*
     |
     |
     |        *
4.23 |
     |                o
     |                *
3.27 |                        *
     |. . . . . . . . . . . . . . . . . . . . . . . . . . . . . . . .
     |                                *      o
     |                                               *       *       o
2.00 |                                                               *
     ++-------------------------------+------------------------------+
      1                               5                              9  step
)");
}

// Thousands of steps share columns: one loss of 101 among a hundred of 1 is a mean of 2.
TEST_F(TinyReport, DrawsTheMeanOfTheStepsOfAColumn) {
  std::string metrics;
  for (int step = 1; step < 6301; ++step) {
    metrics += metrics_line(step, step == 3001 ? "101.0" : "1.0");
  }
  EXPECT_EQ(plot_of(report_of(metrics + metrics_line(6301, "1.0", "1.0")).out),
            R"(nats a byte:  * training (mean of a column)   o held-out
1.99 |                              *
     |
     |
     |
1.63 |
     |
     |
1.36 |
     |
     |
     |
1.00 |****************************** ********************************o
     ++-------------------------------+------------------------------+
      1                             3151                          6301  step
)");
}

TEST_F(TinyReport, DrawsOneStep) {
  const std::string plot = plot_of(report_of(metrics_line(1, "5.5", "5.4")).out);
  EXPECT_THAT(plot, Says("\n5.50 |*\n", "\n5.40 |o\n"));
  EXPECT_THAT(plot, Not(Says("byte frequencies")));
}

// Equal losses are a level line in the middle; a step whose loss is not finite is an empty column.
TEST_F(TinyReport, DrawsEqualLossesAndLeavesOutThoseThatAreNotFinite) {
  const std::string plot = plot_of(
      report_of(metrics_line(1, "3.5") + metrics_line(2, "null") + metrics_line(3, "3.5", "3.5"))
          .out);
  EXPECT_THAT(plot, Says("\n3.55 |\n", "|*" + std::string(62, ' ') + "o\n", "\n3.45 |\n"));
}

TEST_F(TinyReport, SaysThatNoLossIsFinite) {
  const Outcome outcome = report_of(metrics_line(1, "null", "null"));
  EXPECT_EQ(outcome.code, 3);
  EXPECT_THAT(outcome.out, Says("No step has a finite loss: there is nothing to draw.\n"));
}

}  // namespace
}  // namespace tessera::cli::tiny_report_test
