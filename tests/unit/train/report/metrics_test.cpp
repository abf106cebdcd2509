#include "train/report/metrics.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "support/temporary_folder.h"

namespace tessera::train::metrics_test {
namespace {

StepMetrics some_metrics() {
  return {.step = 3,
          .loss = 5.25,
          .grad_norm = 1.5,
          .lr = 0.001,
          .step_ms = 250.0,
          .tps = 12345.6,
          .tps_global = 24691.2,
          .tflops = 0.25,
          .peak_rss_mib = 512.0,
          .val_loss = {},
          .loss_scale = {},
          .skipped_steps = {}};
}

TEST(MetricsJson, KeysStandInOrder) {
  EXPECT_EQ(to_json_line(some_metrics()),
            R"({"step":3,"loss":5.25,"grad_norm":1.5,"lr":0.001,"step_ms":250.0,"tps":12345.6,)"
            R"("tps_global":24691.2,"tflops":0.25,"peak_rss_mib":512.0})");
}

TEST(MetricsJson, ValidationLossIsThereWhereItWasMeasured) {
  StepMetrics metrics = some_metrics();
  metrics.val_loss = 4.5;
  EXPECT_EQ(nlohmann::json::parse(to_json_line(metrics))["val_loss"], 4.5);
}

TEST(MetricsJson, TheValidationBeforeTheFirstStepStandsAlone) {
  StepMetrics metrics;
  metrics.val_loss = 4.5;
  EXPECT_EQ(to_json_line(metrics), R"({"step":0,"val_loss":4.5})");
  EXPECT_EQ(to_step_line(metrics), "step:  0  val_loss:  4.5000");
}

TEST(MetricsJson, SourcesAndStepsWithoutLabelsAreNumbered) {
  StepMetrics metrics = some_metrics();
  metrics.sources = {{0.75, 5.0}, {0.25, std::nan("")}};
  metrics.steps_without_labels = 2;
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_EQ(line["source/1/share"], 0.75);
  EXPECT_EQ(line["source/1/loss"], 5.0);
  EXPECT_EQ(line["source/2/share"], 0.25);
  EXPECT_TRUE(line["source/2/loss"].is_null());
  EXPECT_EQ(line["steps_without_labels"], 2.0);
  EXPECT_THAT(to_step_line(metrics), Says("  without labels: 2"));
}

TEST(MetricsFile, CountsStepsWithoutLabelsOnFromWhereARunWasLeft) {
  const TemporaryFolder folder;
  StepMetrics metrics = some_metrics();
  {
    MetricsFile file(folder.path());
    EXPECT_EQ(file.steps_without_labels(), 0);
    for (const std::int64_t step : {1, 2, 3}) {
      metrics.step = step;
      metrics.steps_without_labels = step + 4;
      file.append(metrics);
    }
  }
  EXPECT_EQ(MetricsFile(folder.path(), 2).steps_without_labels(), 6);
}

TEST(MetricsJson, AScaledLossSaysItsScaleAndTheStepsLeftOut) {
  StepMetrics metrics = some_metrics();
  metrics.grad_norm = std::nan("");
  metrics.loss_scale = 32768.0;
  metrics.skipped_steps = 2;
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_EQ(line["loss_scale"], 32768.0);
  EXPECT_EQ(line["skipped_steps"], 2.0);
  EXPECT_THAT(to_step_line(metrics), Says("  loss_scale: 32768  skipped: 2"));
}

TEST(MetricsJson, ADeviceSaysItsMemoryAndItsShareOfWhatItCanDo) {
  StepMetrics metrics = some_metrics();
  metrics.peak_device_mib = 2048.0;
  metrics.peak_device_reserved_mib = 3072.0;
  metrics.mfu = 0.4125;
  auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_EQ(line["peak_rss_mib"], 512.0);
  EXPECT_EQ(line["peak_device_mib"], 2048.0);
  EXPECT_EQ(line["peak_device_reserved_mib"], 3072.0);
  EXPECT_EQ(line["mfu"], 0.4125);
  EXPECT_THAT(to_step_line(metrics), Says("  memory: 2.00GiB  tps: 12,346  mfu: 0.41  lr: "));
  metrics.mfu = std::nan("");  // of an unknown device
  line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_TRUE(line["mfu"].is_null());
  EXPECT_EQ(to_step_line(metrics).find("mfu"), std::string::npos);
}

TEST(MetricsJson, CallsThatAreReplayedAreCountedAndEagerOnesExplained) {
  StepMetrics metrics = some_metrics();
  metrics.regions = ReplayCalls{.replayed = 6, .recorded = 1, .eager = {}};
  auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_EQ(line["replayed_calls"], 6.0);
  EXPECT_EQ(line["recorded_calls"], 1.0);
  EXPECT_EQ(line["eager_calls"], 0.0);
  EXPECT_TRUE(line["eager_reason"].is_null());
  metrics.regions->eager = {{"a product alone", 1}, {"sizes", 3}};
  line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_EQ(line["eager_calls"], 4.0);
  EXPECT_EQ(line["eager_reason"], "sizes (3); a product alone (1)");
  for (const Scalar& value : named_values(metrics)) EXPECT_NE(value.tag, "eager_reason");
}

TEST(MetricsJson, ExpertsSayHowUnevenTheirLoadIs) {
  StepMetrics metrics = some_metrics();
  metrics.aux_loss = 3.25;
  metrics.expert_loads = {{.layer = 1, .max_over_mean = 1.5}, {.layer = 2, .max_over_mean = 2.0}};
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_EQ(line["aux_loss"], 3.25);
  EXPECT_EQ(line["moe/load_max_over_mean/1"], 1.5);
  EXPECT_EQ(line["moe/load_max_over_mean/2"], 2.0);
}

TEST(MetricsJson, NonFiniteValuesAreNull) {
  StepMetrics metrics = some_metrics();
  metrics.loss = std::nan("");
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
}

TEST(MetricsJson, LossReadsBackBitForBit) {
  StepMetrics metrics = some_metrics();
  metrics.loss = 5.123456789012345678;
  EXPECT_EQ(nlohmann::json::parse(to_json_line(metrics))["loss"].get<double>(), metrics.loss);
}

TEST(StepLine, HasTorchtitansWordsInItsOrder) {
  EXPECT_EQ(
      to_step_line(some_metrics()),
      "step:  3  loss:  5.2500  grad_norm:  1.5000  memory: 0.50GiB  tps: 12,346  lr: 1.00e-03");
}

TEST(StepLine, SurvivesValuesThatAreNotNumbers) {
  StepMetrics metrics = some_metrics();
  metrics.grad_norm = std::nan("");  // a scaler left the step out
  metrics.tps = std::numeric_limits<double>::infinity();
  metrics.val_loss = std::nan("");
  const std::string line = to_step_line(metrics);
  EXPECT_THAT(line, Says("grad_norm:     nan", "tps: inf", "val_loss:     nan"));
}

TEST(StepLine, AStepWithoutLabelsHasNeitherLossNorSpeed) {
  StepMetrics metrics = some_metrics();
  metrics.loss = metrics.grad_norm = std::nan("");
  metrics.tps = metrics.tps_global = metrics.tflops = std::nan("");
  metrics.steps_without_labels = 1;
  EXPECT_EQ(to_step_line(metrics),
            "step:  3  loss:       -  grad_norm:       -  tps: -  lr: 1.00e-03  without labels: 1");
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  for (const char* key : {"loss", "grad_norm", "tps", "tps_global", "tflops"}) {
    EXPECT_TRUE(line.at(key).is_null()) << key;
  }
  std::vector<std::string> tags;
  for (const Scalar& value : without_nan(named_values(metrics))) tags.push_back(value.tag);
  EXPECT_EQ(tags,
            (std::vector<std::string>{"lr", "step_ms", "peak_rss_mib", "steps_without_labels"}));
}

// Drawn: every combination of what a step may have, small numbers and far too large ones.
TEST(StepLine, FitsAHundredColumnsForAnyStep) {
  std::mt19937 random(3);
  const auto maybe = [&](double value) {
    return random() % 2 == 0 ? std::optional<double>() : std::optional(value);
  };
  const auto number = [&] {
    const double sizes[] = {0.0, 1e-9, 0.5,  9.99999, 123.4,    12345.6,
                            1e7, 1e30, -NAN, NAN,     INFINITY, -INFINITY};
    return sizes[random() % std::size(sizes)];
  };
  for (int round = 0; round < 3000; ++round) {
    StepMetrics metrics;
    metrics.step = static_cast<std::int64_t>(random() % 2 == 0 ? random() % 100 : random());
    metrics.loss = number();
    metrics.grad_norm = number();
    metrics.lr = std::abs(number());
    metrics.tps = number();
    metrics.peak_rss_mib = 1e6 * static_cast<double>(random() % 1000) / 999;
    metrics.peak_device_mib = maybe(81559.0);
    metrics.mfu = maybe(0.4321);
    metrics.val_loss = maybe(number());
    const double scales[] = {1.0, 65536.0, 0x1p24, 0x1p40, 0x1p-30, 16777217.0, 0.1, 1e-9};
    metrics.loss_scale = maybe(scales[random() % std::size(scales)]);
    const auto count = static_cast<std::int64_t>(random() % 100000);
    if (random() % 2 == 0) metrics.skipped_steps = count;
    if (random() % 2 == 0) metrics.steps_without_labels = count + 1;
    const std::string line = to_step_line(metrics);
    EXPECT_LE(line.size(), kStepLineColumns) << line;
    EXPECT_THAT(line, StartsWith("step: "));
    EXPECT_EQ(line.find("val_loss: ") != std::string::npos,
              metrics.val_loss.has_value() || metrics.step == 0);
    EXPECT_EQ(line.find("  loss: ") != std::string::npos, metrics.step > 0);
    EXPECT_THAT(line, Not(Says("-nan")));
    if (metrics.step == 0) continue;
    // The line drops lr after columns that others have as well.
    const bool has_lr = line.find("  lr: ") != std::string::npos;
    for (const char* before : {"  memory: ", "  mfu: ", "  loss_scale: ", "  tps: "}) {
      EXPECT_TRUE(has_lr || line.find(before) == std::string::npos) << line;
    }
    const auto scale = line.find("  loss_scale: ");
    if (scale == std::string::npos) continue;
    const auto end = std::min(line.find("  ", scale + 2), line.size());
    EXPECT_LE(end - scale, std::string("  loss_scale: 1.7e+07").size()) << line;
  }
}

// Naive: a scale of 12 digits that pushes lr out, and the sign of a NaN.
TEST(StepLine, ASkippedStepHasItsLearningRateAndAScaleThatIsShort) {
  StepMetrics metrics = some_metrics();
  metrics.step = 1;
  metrics.loss = 5.6186;
  metrics.grad_norm = -std::nan("");
  metrics.tps = 151.0;
  metrics.skipped_steps = 1;
  for (const auto& [scale, text] : {std::pair{65536.0, "65536"},
                                    {0x1p24, "2^24"},
                                    {0x1p-20, "2^-20"},
                                    {0.5, "0.5"},
                                    {16777217.0, "1.7e+07"}}) {
    metrics.loss_scale = scale;
    EXPECT_EQ(to_step_line(metrics),
              std::string("step:  1  loss:  5.6186  grad_norm:     nan  tps: 151  lr: 1.00e-03  "
                          "loss_scale: ") +
                  text + "  skipped: 1");
  }
}

// On a device, after ten thousand steps, no part is dropped.
TEST(StepLine, HasAllOfAUsualStepOfADevice) {
  StepMetrics metrics = some_metrics();
  metrics.step = 1234;
  metrics.peak_device_mib = 62464.0;
  metrics.mfu = 0.4125;
  EXPECT_EQ(
      to_step_line(metrics),
      "step: 1234  loss:  5.2500  grad_norm:  1.5000  memory: 61.0GiB  tps: 12,346  mfu: 0.41  "
      "lr: 1.00e-03");
}

TEST(StepLine, GroupsThousands) {
  StepMetrics metrics = some_metrics();
  for (const auto& [tps, text] :
       {std::pair{999.0, "tps: 999 "}, {1000.0, "tps: 1,000 "}, {1234567.0, "tps: 1,234,567 "}}) {
    metrics.tps = tps;
    EXPECT_THAT(to_step_line(metrics), Says(text));
  }
}

TEST(MetricsFile, StartsAgainAndAppends) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "metrics");
  std::ofstream(folder / "metrics" / "metrics.jsonl") << "of an older run\n";
  MetricsFile file(folder / "metrics");
  file.append(some_metrics());
  file.append(some_metrics());
  EXPECT_EQ(read_file(folder / "metrics" / "metrics.jsonl"),
            to_json_line(some_metrics()) + "\n" + to_json_line(some_metrics()) + "\n");
}

TEST(MetricsFile, IsCutBackToTheStepsThatAreDone) {
  const TemporaryFolder folder;
  const auto line = [](std::int64_t step) {
    auto metrics = some_metrics();
    metrics.step = step;
    return to_json_line(metrics) + "\n";
  };
  const auto after = [&](const std::string& before, std::int64_t done) {
    const auto path = folder.write("metrics/metrics.jsonl", before);
    auto next = some_metrics();
    next.step = done + 1;
    MetricsFile(folder / "metrics", done).append(next);
    return read_file(path);
  };
  const auto three = line(1) + line(2) + line(3);
  EXPECT_EQ(after(three, 3), three + line(4));
  EXPECT_EQ(after(three, 2), line(1) + line(2) + line(3)) << "step 3 is done again";
  EXPECT_EQ(after(line(1) + line(2) + "{\"step\": 3, \"lo", 3), line(1) + line(2) + line(4))
      << "a crash tore the last line";
  EXPECT_EQ(after("", 2), line(3));
  std::filesystem::remove_all(folder / "metrics");
  MetricsFile(folder / "metrics", 5).append(some_metrics());
  EXPECT_TRUE(std::filesystem::exists(folder / "metrics/metrics.jsonl"));
}

// Naive: opened by its name, the target of a link is emptied, or replaced by a copy.
TEST(MetricsFile, ALinkIsRefusedAndItsTargetKept) {
  const std::string lines = "{\"step\": 1}\n{\"step\": 2}\n";
  for (const std::int64_t done : {0, 1}) {
    const TemporaryFolder folder;
    folder.write("target", lines);
    const auto link = folder / "metrics/metrics.jsonl";
    std::filesystem::create_directories(link.parent_path());
    for (const char* target : {"target", "nothing"}) {
      std::filesystem::remove(link);
      std::filesystem::create_symlink(folder / target, link);
      EXPECT_REFUSED(kIo, MetricsFile(folder / "metrics", done),
                     "metrics.jsonl': found a symbolic link, expected a regular file");
    }
    EXPECT_EQ(read_file(folder / "target"), lines);
    EXPECT_FALSE(std::filesystem::exists(folder / "nothing"));
    EXPECT_TRUE(std::filesystem::is_symlink(link));
  }
}

TEST(MetricsFile, AFolderThatIsALinkIsFine) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "disk");
  std::filesystem::create_symlink(folder / "disk", folder / "metrics");
  MetricsFile(folder / "metrics").append(some_metrics());
  MetricsFile(folder / "metrics", 1).append(some_metrics());
  EXPECT_TRUE(std::filesystem::is_regular_file(folder / "disk/metrics.jsonl"));
}

TEST(MetricsFile, SaysWhereItCannotWrite) {
  EXPECT_REFUSED(kIo, MetricsFile file("/dev/null/metrics"), "/dev/null/metrics");
}

TEST(Flops, IsTheFormulaOfTheInterface) {
  // 6 x 1000 + 12 x 2 x 3 x 4 x 5
  EXPECT_EQ(flops_per_token({.active_parameters = 1000, .layers = 2, .heads = 3, .head_dim = 4}, 5),
            7440.0);
}

}  // namespace
}  // namespace tessera::train::metrics_test
