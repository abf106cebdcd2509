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

TEST(LearningRate, LinearEndsAtTheFactor) {
  const LrSchedulerConfig schedule{
      .warmup_steps = 2, .decay = LrDecay::kLinear, .min_lr_factor = 0.1};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 2), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 6), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 10, 10), 0.1);
}

TEST(LearningRate, CosineIsHalfwayInTheMiddleAndEndsAtTheFactor) {
  const LrSchedulerConfig schedule{.decay = LrDecay::kCosine, .min_lr_factor = 0.2};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 8, 4), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 8, 8), 0.2);
  EXPECT_GT(learning_rate(schedule, 1.0, 8, 1), 0.96);  // flat at the start, unlike a line (0.9)
}

TEST(LearningRate, WarmUpLongerThanTheRunNeverDecays) {
  const LrSchedulerConfig schedule{.warmup_steps = 10, .decay = LrDecay::kCosine};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1.0, 5, 5), 0.5);
}

}  // namespace
}  // namespace tessera::train::schedule_test
