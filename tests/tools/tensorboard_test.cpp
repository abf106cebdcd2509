// Event files, read back by the tensorboard package itself.
#include "io/tensorboard.h"

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "support/test.h"
#include "tools/python.h"

namespace tessera::cli::tensorboard_test {
namespace {

using nlohmann::json;

json read_events(const TemporaryFolder& folder, const std::string& events) {
  const Outcome outcome = run_python(folder, "tests/tools/read_events.py", {events});
  EXPECT_EQ(outcome.code, 0) << outcome.err
                             << "\nscripts/bootstrap --with-tools installs tensorboard";
  return outcome.code == 0 ? json::parse(outcome.out) : json::object();
}

std::vector<std::int64_t> steps_of(const json& scalars) {
  std::vector<std::int64_t> steps;
  for (const auto& scalar : scalars) steps.push_back(scalar[0]);
  return steps;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

TEST(TensorBoard, ReadsBackEveryScalarWithItsStepAndTime) {
  const TemporaryFolder folder;
  const double before = seconds_since_1970();
  {
    EventFile file(folder / "tb", 1);
    for (int step = 1; step <= 300; ++step) {
      file.append(step, {{"loss", 1.0 / step}, {"tps", 1e5 * step}});
    }
    file.append(301, {{"val_loss", -3.25}, {"loss", 1e-20}});
  }
  const double after = seconds_since_1970();
  const json found = read_events(folder, "tb");
  ASSERT_EQ(found.size(), 3U) << found.dump();
  ASSERT_EQ(found["loss"].size(), 301U);
  ASSERT_EQ(found["tps"].size(), 300U);
  for (std::size_t i = 0; i < 300; ++i) {
    const auto step = static_cast<double>(i + 1);
    EXPECT_EQ(found["loss"][i][0], i + 1);
    EXPECT_EQ(found["loss"][i][1].get<double>(), static_cast<float>(1.0 / step));
    EXPECT_EQ(found["tps"][i][1].get<double>(), static_cast<float>(1e5 * step));
    EXPECT_GE(found["loss"][i][2].get<double>(), before);
    EXPECT_LE(found["loss"][i][2].get<double>(), after);
  }
  EXPECT_EQ(found["loss"][300][1].get<double>(), 1e-20F);
  EXPECT_EQ(found["val_loss"][0][1], -3.25);
}

TEST(TensorBoard, StepsThatRanTwiceAreShownOnceAfterAResume) {
  const TemporaryFolder folder;
  {
    EventFile first(folder / "tb", 1);
    for (int step = 1; step <= 7; ++step) first.append(step, {{"loss", 1.0 * step}});
    first.append(7, {{"val_loss", 70.0}});
  }
  {
    EventFile resumed(folder / "tb", 5);  // from the checkpoint of step 4
    for (int step = 5; step <= 6; ++step) resumed.append(step, {{"loss", 10.0 * step}});
  }
  const json found = read_events(folder, "tb");
  EXPECT_EQ(steps_of(found["loss"]), (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(found["loss"][3][1], 4.0);
  EXPECT_EQ(found["loss"][4][1], 50.0);
  // Its only value is of a step that ran again without one.
  if (found.contains("val_loss")) {
    EXPECT_EQ(steps_of(found["val_loss"]), std::vector<std::int64_t>{});
  }
}

TEST(TensorBoard, ARunsScalarsAreItsMetrics) {
  const SmallRun folder;
  succeeded(run_program(folder, {"train", "run.toml", "--job.dump_folder", "run", "--nproc", "2",
                                 "--validation.path", "page.txt", "--validation.interval", "2"}));
  const json found = read_events(folder, "run/metrics/tb");
  std::map<std::string, std::size_t> next;
  std::istringstream lines(read_file(folder / "run/metrics/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const json metrics = json::parse(line);
    for (const auto& [name, value] : metrics.items()) {
      if (name == "step") continue;
      ASSERT_TRUE(found.contains(name)) << name;
      const auto& scalar = found[name].at(next[name]++);
      EXPECT_EQ(scalar[0], metrics["step"]);
      EXPECT_EQ(scalar[1].get<double>(), static_cast<float>(value.get<double>())) << name;
    }
  }
  EXPECT_EQ(next["loss"], 3U);
  EXPECT_EQ(next["val_loss"], 3U) << "before the first step, too";
  for (const auto& [name, scalars] : found.items()) EXPECT_EQ(scalars.size(), next[name]) << name;
}

TEST(TensorBoard, IsWrittenUnlessTurnedOff) {
  const SmallRun folder;
  ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "off",
                                 "--metrics.enable_tensorboard", "false"})
                .code,
            0);
  EXPECT_FALSE(std::filesystem::exists(folder / "off/metrics/tb"));
  for (int again = 0; again < 2; ++again) {
    ASSERT_EQ(run_program(folder, {"train", "run.toml", "--job.dump_folder", "on",
                                   "--checkpoint.enable", "false"})
                  .code,
              0);
  }
  const auto files = std::filesystem::directory_iterator(folder / "on/metrics/tb");
  EXPECT_EQ(std::distance(files, {}), 1)
      << "a run that starts from step 0 removes the earlier file";
}

// Step 3 of the first run comes again, and is shown once.
TEST(TensorBoard, AResumedRunResumesWithoutWhatRanTwice) {
  const SmallRun folder;
  const auto train = [&](const std::string& steps, const std::string& from) {
    return run_program(folder,
                       {"train", "run.toml", "--job.dump_folder", "run", "--training.steps", steps,
                        "--checkpoint.interval", "2", "--checkpoint.load_step", from});
  };
  ASSERT_EQ(train("3", "-1").code, 0);
  ASSERT_EQ(train("5", "2").code, 0);
  const json losses = read_events(folder, "run/metrics/tb").at("loss");
  ASSERT_EQ(losses.size(), 5U);
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_EQ(losses[i][0], i + 1);
}

}  // namespace
}  // namespace tessera::cli::tensorboard_test
