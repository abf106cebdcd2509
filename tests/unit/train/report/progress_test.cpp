#include "train/report/progress.h"

#include <gtest/gtest.h>

namespace tessera::train::progress_test {
namespace {

using std::chrono::seconds;

TEST(Progress, DurationsHaveTheUnitsThatTheyNeed) {
  EXPECT_EQ(duration_text(seconds(0)), "0:00");
  EXPECT_EQ(duration_text(seconds(-5)), "0:00");
  EXPECT_EQ(duration_text(seconds(59)), "0:59");
  EXPECT_EQ(duration_text(seconds(754)), "12:34");
  EXPECT_EQ(duration_text(seconds(3600)), "1:00:00");
  EXPECT_EQ(duration_text(seconds(2 * 86400 + 3 * 3600 + 7)), "2 d 3:00:07");
}

TEST(Progress, LoadingSaysHowMuchOfWhat) {
  constexpr std::int64_t kMib = 1024 * 1024;
  EXPECT_EQ(loading_text("loading weights", 180 * kMib, 400 * kMib),
            "loading weights   45 %  180 of 400 MiB");
  EXPECT_EQ(loading_text("loading weights", 0, 0), "loading weights  100 %  0 of 0 MiB");
}

TEST(Progress, TrainingSaysStepLossSpeedAndTime) {
  StepMetrics metrics;
  metrics.step = 12;
  metrics.loss = 3.42101;
  metrics.tps = 12345.4;
  EXPECT_EQ(training_text(metrics, 300, seconds(205)),
            "step 12 of 300    4 %  loss 3.4210  tps 12,345  3:25 left");
  EXPECT_EQ(training_text(metrics, 300, std::nullopt),
            "step 12 of 300    4 %  loss 3.4210  tps 12,345");
}

}  // namespace
}  // namespace tessera::train::progress_test
