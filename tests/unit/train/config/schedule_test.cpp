#include <gtest/gtest.h>

#include "train/config/config_resolve.h"

namespace tessera::train::schedule_test {
namespace {

TEST(LearningRate, WarmsUpInEqualSteps) {
  const LrSchedulerConfig schedule{.warmup_steps = 4};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 1), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 3), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 4), 0.8);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.8, 10, 5), 0.8);
}

TEST(LearningRate, ConstantWithoutAnything) {
  for (int step = 1; step <= 5; ++step) EXPECT_EQ(learning_rate({}, 0.3, 5, step), 0.3);
}

// At the factor one step behind the last, so that the last one learns: step s of n after a warm-up of
// w has gone (s - w) / (n + 1 - w) of the way.
TEST(LearningRate, LinearWouldBeAtTheFactorOneStepAfterTheLast) {
  const LrSchedulerConfig schedule{
      .warmup_steps = 2, .decay = LrDecay::kLinear, .min_lr_factor = 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 2), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 5), 0.1 + 0.9 * 6 / 9);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 10), 0.1 + 0.9 / 9);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 11), 0.1);
}

TEST(LearningRate, CosineIsHalfwayInTheMiddleAndWouldEndOneStepAfterTheLast) {
  const LrSchedulerConfig schedule{.decay = LrDecay::kCosine, .min_lr_factor = 0.2};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 7, 4), 0.6);
  EXPECT_GT(learning_rate(schedule, 1.0, 7, 7), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 7, 8), 0.2);
  EXPECT_GT(learning_rate(schedule, 1.0, 7, 1), 0.96);  // flat at the start, unlike a line (0.9)
}

TEST(LearningRate, TheLastStepLearnsWithoutAFloor) {
  for (const auto decay : {LrDecay::kLinear, LrDecay::kCosine, LrDecay::kWsd}) {
    for (const std::int64_t steps : {1, 2, 100}) {
      const LrSchedulerConfig schedule{.decay = decay, .decay_steps = 1};
      EXPECT_GT(learning_rate(schedule, 1.0, steps, steps), 0.0);
      EXPECT_NEAR(learning_rate(schedule, 1.0, steps, steps + 1), 0.0, 1e-15);
    }
  }
}

TEST(LearningRate, WsdIsWholeUpToItsLastStepsAndThenALine) {
  const LrSchedulerConfig schedule{
      .warmup_steps = 3, .decay = LrDecay::kWsd, .decay_steps = 4, .min_lr_factor = 0.5};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.9, 20, 1), 0.3);
  for (int step = 3; step <= 16; ++step) {
    EXPECT_EQ(learning_rate(schedule, 0.9, 20, step), 0.9) << step;
  }
  for (int step = 17; step <= 21; ++step) {
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 0.9, 20, step), 0.9 * (1 - 0.5 * (step - 16) / 5.0));
  }
}

// With all that a warm-up leaves it is the line, and more than that there is not.
TEST(LearningRate, WsdOverAllStepsIsLinear) {
  const LrSchedulerConfig linear{
      .warmup_steps = 2, .decay = LrDecay::kLinear, .min_lr_factor = 0.1};
  for (const std::int64_t decay_steps : {8, 9, 100}) {
    auto schedule = linear;
    schedule.decay = LrDecay::kWsd;
    schedule.decay_steps = decay_steps;
    EXPECT_EQ(last_whole_step(schedule, 10), 2);
    for (int step = 1; step <= 10; ++step) {
      EXPECT_EQ(learning_rate(schedule, 1.0, 10, step), learning_rate(linear, 1.0, 10, step));
    }
  }
}

TEST(LearningRate, WarmUpLongerThanTheRunNeverDecays) {
  const LrSchedulerConfig schedule{.warmup_steps = 10, .decay = LrDecay::kCosine};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 5, 5), 0.5);
}

}  // namespace
}  // namespace tessera::train::schedule_test
