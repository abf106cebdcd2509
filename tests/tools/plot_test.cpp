// tools/plot.py on the metrics of a run.

#include "support/test.h"
#include "tools/python.h"

namespace tessera::cli::plot_test {
namespace {

std::string metrics_line(int step) {
  const std::string number = std::to_string(step);
  return R"({"step":)" + number + R"(,"loss":2.5,"grad_norm":null,"lr":0.1,"step_ms":10.0,)" +
         R"("tps":100.0,"tps_global":200.0,"tflops":0.1,"peak_rss_mib":)" + number + "}\n";
}

/// Width and height of a PNG; nothing for any other file.
std::vector<unsigned> size_of_png(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  if (bytes.size() < 24 || bytes.substr(0, 8) != "\x89PNG\r\n\x1A\n") return {};
  const auto number = [&](std::size_t at) {
    unsigned value = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      value = value << 8U | static_cast<unsigned char>(bytes[at + i]);
    }
    return value;
  };
  return {number(16), number(20)};
}

TEST(PlotTool, DrawsARunIntoItsFolder) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "run",
                                 "--validation.path", "page.txt"})
                .code,
            0);
  const Outcome outcome = run_python(folder, "tools/plot.py", {"run"});
  ASSERT_EQ(outcome.code, 0) << outcome.err
                             << "\nscripts/bootstrap --with-tools installs matplotlib";
  EXPECT_EQ(outcome.out, "run/metrics.png\n");
  const auto size = size_of_png(folder / "run/metrics.png");
  ASSERT_EQ(size.size(), 2U);
  EXPECT_GE(size[0], 1000U);
  EXPECT_GE(size[1], 600U);
}

TEST(PlotTool, TakesAFileAndLeavesOutTheLineThatACrashHasTorn) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl", metrics_line(1) + metrics_line(2) + R"({"step":3,"lo)");
  succeeded(run_python(folder, "tools/plot.py", {"metrics.jsonl", "out.png"}));
  EXPECT_EQ(size_of_png(folder / "out.png").size(), 2U);
}

/// Replaces matplotlib: prints the value of `answer`, an expression of `axes` and `loss`.
void write_pyplot(const TemporaryFolder& folder, const std::string& answer) {
  folder.write("drawn/matplotlib/__init__.py", "def use(_): pass\n");
  folder.write("drawn/matplotlib/pyplot.py", R"(from unittest import mock

def subplots(*_, **__):
    axes = type("Grid", (list,), {})([[mock.MagicMock(), mock.MagicMock()] for _ in range(2)])
    axes.flat = [axis for row in axes for axis in row]
    for axis in axes.flat:
        axis.get_ylim.return_value = (0, 1)
    loss = axes[0][0]
    figure = mock.MagicMock()
    figure.savefig.side_effect = lambda *_, **__: print()" +
                                                 answer + ")\n    return figure, axes\n");
}

/// The steps at which each of the four pictures has a line from top to bottom.
std::string marks(const TemporaryFolder& folder, const std::string& run) {
  write_pyplot(folder,
               "[[call.args[0] for call in axis.axvline.call_args_list] for axis in axes.flat]");
  const Outcome outcome = succeeded(run_python(folder, "tools/plot.py", {run}, "PYTHONPATH=drawn"));
  return outcome.out.substr(0, outcome.out.find('\n'));
}

// Naive: a loss that falls at a step where the schedule has changed looks as if training did it.
TEST(PlotTool, MarksWhereTheRunWasResumed) {
  const SmallRun folder;
  const auto train = [&](const std::string& steps, const std::string& load_step = "-1",
                         const std::string& ranks = "1") {
    succeeded(run_program(folder, {"train", "run.toml", "--job.dump_folder", "run", "--nproc",
                                   ranks, "--checkpoint.interval", "1", "--training.steps", steps,
                                   "--checkpoint.load_step", load_step}));
  };
  const auto at = [](const std::string& steps) {
    std::string all;
    for (int i = 0; i < 4; ++i) all += concat(i == 0 ? "[[" : ", [", steps, "]");
    return all + "]";
  };
  train("2");
  EXPECT_EQ(marks(folder, "run"), at(""));
  train("3");
  train("5", "-1", "2");
  EXPECT_EQ(marks(folder, "run/metrics/metrics.jsonl"), at("2, 3"));
  train("4", "2");
  EXPECT_EQ(marks(folder, "run"), at("2")) << "what came after step 2 was made again";
  std::filesystem::remove_all(folder / "run/checkpoint");
  train("2");
  EXPECT_EQ(marks(folder, "run"), at("")) << "the run began again";
}

// Naive: a median among values that are not numbers is any of them, or none.
TEST(PlotTool, SmoothsTheLossesOfTheStepsThatHaveOne) {
  const TemporaryFolder folder;
  std::string lines;
  for (int step = 1; step <= 200; ++step) {
    const std::string loss = step % 3 == 0 ? std::to_string(step) + ".0" : "null";
    lines += "{\"step\":" + std::to_string(step) + ",\"loss\":" + loss + "}\n";
  }
  folder.write("metrics.jsonl", lines);
  write_pyplot(folder,
               "max(abs(found - step) if found == found else 1e9 for step, found in "
               "zip(*loss.plot.call_args_list[1].args))");
  const Outcome outcome =
      succeeded(run_python(folder, "tools/plot.py", {"metrics.jsonl"}, "PYTHONPATH=drawn"));
  // A window is 9 steps, at the ends 5 of them.
  EXPECT_LE(std::stod(outcome.out), 4.0) << outcome.out;
}

TEST(PlotTool, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  folder.write("torn.jsonl", metrics_line(1) + "nonsense\n" + metrics_line(2));
  folder.write("empty.jsonl", "");
  folder.write("good.jsonl", metrics_line(1));
  folder.write("without/matplotlib.py", "raise ImportError('not here')\n");
  struct Case {
    std::vector<std::string> words;
    std::string says;
    std::string environment = "";
  };
  for (const Case& c : {Case{{"absent"}, "found no absent/metrics/metrics.jsonl"},
                        Case{{"torn.jsonl"}, "torn.jsonl:2: found a line that is no metrics"},
                        Case{{"empty.jsonl"}, "found no step"}, Case{{}, "found 0 arguments"},
                        Case{{"good.jsonl", "absent/out.png"}, "absent/out.png"},
                        Case{{"good.jsonl"}, "found no matplotlib", "PYTHONPATH=without"}}) {
    const Outcome outcome = run_python(folder, "tools/plot.py", c.words, c.environment);
    EXPECT_THAT(outcome, Exits(2, "plot: ", c.says));
    EXPECT_THAT(outcome.err, Not(Says("Traceback")));
  }
}

}  // namespace
}  // namespace tessera::cli::plot_test
