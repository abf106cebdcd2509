// Schedules whose records are kept: those in use, with any number of others that occur once.
#include "fsdp/agreed/known_steps.h"

#include <random>

#include "support/test.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::known_steps_test {
namespace {

constexpr int kStages = 1;

StepRecord record_of(UnitId unit) {
  StepRecord record;
  record.stages.resize(kStages);
  record.stages[0].parts = {flat({unit})};
  return record;
}

/// As a step: whether it followed what was recorded.
bool step(KnownSteps& known, const std::string& schedule, UnitId unit = 0) {
  const auto* found = known.follow({schedule, kStages});
  if (found != nullptr) {
    EXPECT_EQ(found->record, record_of(unit)) << schedule;
    return true;
  }
  known.put({schedule, kStages}, record_of(unit));
  return false;
}

TEST(KnownSteps, AScheduleIsFollowedFromItsSecondStepOn) {
  KnownSteps known;
  EXPECT_FALSE(step(known, "train"));
  EXPECT_TRUE(step(known, "train"));
  EXPECT_EQ(known.follow({"train", kStages + 1}), nullptr) << "of another number of stages";
  known.forget({"train", kStages});
  EXPECT_FALSE(step(known, "train"));
  known.clear();
  EXPECT_FALSE(step(known, "train"));
}

TEST(KnownSteps, WhatIsPutAgainTakesItsPlace) {
  KnownSteps known;
  step(known, "train", 1);
  known.put({"train", kStages}, record_of(2));
  EXPECT_TRUE(step(known, "train", 2));
}

// Naive: one too many drops all, or schedules that occur once replace those in use.
TEST(KnownSteps, SchedulesInUseStayWithAnyNumberThatComeOnce) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    std::mt19937_64 draw(seed);
    KnownSteps known;
    const std::size_t in_use = 1 + draw() % (KnownSteps::kMost - 1);
    for (int twice = 0; twice < 2; ++twice) {
      for (UnitId i = 0; i < in_use; ++i) EXPECT_EQ(step(known, concat("used ", i), i), twice == 1);
    }
    for (int i = 0; i < 300; ++i) {
      if (draw() % 2 == 0) {
        const auto one = static_cast<UnitId>(draw() % in_use);
        EXPECT_TRUE(step(known, concat("used ", one), one)) << i;
      } else {
        EXPECT_FALSE(step(known, concat("step ", i)));
      }
    }
  }
}

// Naive: where schedules in use take all places, new ones replace each other forever.
TEST(KnownSteps, NewSchedulesInTurnAreFollowedHoweverManyAreInUse) {
  KnownSteps known;
  for (int twice = 0; twice < 2; ++twice) {
    for (std::size_t i = 0; i < KnownSteps::kMost; ++i) step(known, concat(i));
  }
  EXPECT_TRUE(step(known, "0"));
  EXPECT_FALSE(step(known, "a"));
  EXPECT_FALSE(step(known, "b"));
  EXPECT_TRUE(step(known, "a"));
  EXPECT_TRUE(step(known, "b"));
  // The two that were followed longest ago have made room.
  EXPECT_FALSE(step(known, "1"));
  EXPECT_FALSE(step(known, "2"));
  EXPECT_TRUE(step(known, "0"));
  EXPECT_TRUE(step(known, "3"));
}

TEST(KnownSteps, SaysWhenNoneOfManyInARowWasFollowed) {
  KnownSteps known;
  for (std::size_t i = 0; i + 1 < KnownSteps::kMost; ++i) step(known, concat("step ", i));
  EXPECT_FALSE(known.are_all_new());
  EXPECT_TRUE(step(known, "step 0"));
  for (std::size_t i = 0; i < KnownSteps::kMost; ++i) {
    EXPECT_FALSE(known.are_all_new());
    step(known, concat("later ", i));
  }
  EXPECT_TRUE(known.are_all_new());
}

}  // namespace
}  // namespace tessera::fsdp::known_steps_test
