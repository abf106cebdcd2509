// What a traced step says of its units' costs.
#include "capture/measured_profile.h"

#include <gtest/gtest.h>

#include "base/text/printable.h"

namespace tessera::capture::measured_profile_test {
namespace {

/// From and to in ms.
TraceSpan span(TraceRow row, const std::string& name, double from, double to) {
  const auto at = [](double ms) {
    return TraceClock::time_point(std::chrono::duration_cast<TraceClock::duration>(
        std::chrono::duration<double, std::milli>(ms)));
  };
  return {row, name, at(from), at(to)};
}
TraceSpan waited(TraceSpan span, double ms) {
  span.arguments.emplace_back("waited_ms", ms);
  return span;
}

std::vector<fsdp::PlanUnit> units() {
  std::vector<fsdp::PlanUnit> units(3);
  units[0] = {.name = std::string(unit_label("")), .bytes = 1000, .gathers = true};
  units[1] = {.name = "layers.0", .bytes = 2000, .gathers = true};
  units[2] = {.name = "layers.1", .bytes = 4000, .gathers = true};
  return units;
}

// Naive: the root costs what its layers cost, and a unit what its rank waited for others.
TEST(MeasuredProfile, IsWhatAUnitComputesItself) {
  const std::vector<TraceSpan> spans{
      span(TraceRow::kCompute, "step 3", 0, 100),
      span(TraceRow::kCompute, "forward ", 0, 20),
      span(TraceRow::kCompute, "forward layers.0", 1, 6),
      span(TraceRow::kWaits, "layers.1", 4, 5),
      span(TraceRow::kCompute, "forward layers.1", 6, 16),
      span(TraceRow::kCompute, "backward ", 20, 60),
      span(TraceRow::kCompute, "backward layers.1", 22, 40),
      span(TraceRow::kCompute, "forward again layers.1", 23, 31),
      span(TraceRow::kWaits, "elsewhere", 70, 80),
      // Without a marker it lasts as long as all.
      span(TraceRow::kCompute, "backward layers.0", 40, 60),
  };
  const auto profile = measured_profile(spans, units(), 1);
  EXPECT_DOUBLE_EQ(profile.units[0].forward_ms, 20 - 5 - 10);
  EXPECT_DOUBLE_EQ(profile.units[1].forward_ms, 5 - 1);
  EXPECT_DOUBLE_EQ(profile.units[2].forward_ms, 10);
  EXPECT_DOUBLE_EQ(profile.units[2].backward_ms, 18);
  EXPECT_DOUBLE_EQ(profile.units[1].backward_ms, 20);
  EXPECT_DOUBLE_EQ(profile.units[0].backward_ms, 40 - 18 - 20);
  EXPECT_FALSE(profile.is_assumed);
  // A module that runs again inside its backward leaves no span of that: it is taken off.
  const auto again = measured_profile(
      spans, units(), 1, {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull});
  EXPECT_DOUBLE_EQ(again.units[2].backward_ms, 18 - 10);
  EXPECT_DOUBLE_EQ(again.units[1].backward_ms, 20 - 4 * kSelectiveShare);
  EXPECT_DOUBLE_EQ(again.units[0].backward_ms, profile.units[0].backward_ms);
  const auto halves = measured_profile(spans, units(), 2);
  EXPECT_DOUBLE_EQ(halves.units[2].backward_ms, 9);
}

// A gather that was there before it was wanted ends where it was waited for: the shortest counts.
TEST(MeasuredProfile, AGatherIsAsLongAsItsShortest) {
  const std::vector<TraceSpan> spans{
      span(TraceRow::kGathers, "layers.0", 0, 9),
      span(TraceRow::kGathers, "layers.0", 20, 22),
      span(TraceRow::kGathers, "layers.1", 30, 34),
  };
  const auto profile = measured_profile(spans, units(), 1);
  EXPECT_DOUBLE_EQ(profile.units[1].gather_ms.value(), 2);
  EXPECT_DOUBLE_EQ(profile.units[2].gather_ms.value(), 4);
  EXPECT_FALSE(profile.units[0].gather_ms.has_value());
  // 2 ms of 2000 bytes and 4 of 4000 are a line, and the root is on it.
  EXPECT_NEAR(profile.gather_ms(units(), 0), 1, 1e-9);
}

// Naive: of units alike those are kept whose gather happened to meet a slow moment.
TEST(MeasuredProfile, UnitsOfAsManyBytesHaveTheSameGather) {
  auto alike = units();
  for (auto& unit : alike) unit.bytes = 1000;
  const std::vector<TraceSpan> spans{
      span(TraceRow::kGathers, std::string(unit_label("")), 0, 3),
      span(TraceRow::kGathers, "layers.0", 20, 22),
      span(TraceRow::kGathers, "layers.1", 30, 39),
  };
  for (const auto& unit : measured_profile(spans, alike, 1).units) {
    EXPECT_DOUBLE_EQ(unit.gather_ms.value(), 3) << unit.name;
  }
}

// They are wanted when all has been computed. Naive: one that went out early is a long one.
TEST(MeasuredProfile, AReductionIsWhatItsRankWaitedForIt) {
  const std::vector<TraceSpan> spans{
      waited(span(TraceRow::kReductions, "layers.1", 20, 90), 5),
      waited(span(TraceRow::kReductions, "layers.0", 60, 91), 1),
      waited(span(TraceRow::kReductions, "layers.0", 160, 191), 2),
      span(TraceRow::kReplicas, "layers.1", 91, 95),
  };
  const auto profile = measured_profile(spans, units(), 2);
  EXPECT_DOUBLE_EQ(profile.units[2].reduce_ms.value(), 5);
  EXPECT_DOUBLE_EQ(profile.units[1].reduce_ms.value(), 1.5);
  EXPECT_FALSE(profile.units[0].reduce_ms.has_value());
}

// So that a step is as long as its parts: the update, and what ranks tell each other.
TEST(MeasuredProfile, TheRestIsWhatNeitherUnitsNorTheirMessagesTook) {
  const std::vector<TraceSpan> spans{
      span(TraceRow::kCompute, "step 3", 0, 100),
      waited(span(TraceRow::kGathers, "layers.0", 1, 9), 4),
      span(TraceRow::kWaits, "layers.0", 5, 9),
      span(TraceRow::kCompute, "forward layers.0", 9, 29),
      span(TraceRow::kWaits, "labels", 12, 15),
      span(TraceRow::kCompute, "backward layers.0", 30, 60),
      waited(span(TraceRow::kReductions, "layers.0", 55, 68), 8),
      span(TraceRow::kOptimizer, "update", 70, 95),
  };
  EXPECT_DOUBLE_EQ(measured_profile(spans, units(), 1).rest_ms, 100 - 4 - (20 - 3) - 30 - 8);
  EXPECT_DOUBLE_EQ(measured_profile(spans, units(), 4).rest_ms, 41) << "of the step";
  EXPECT_DOUBLE_EQ(measured_profile(spans, units(), 4).gathers_waited_ms.value(), 4);
  // Without the step's own span nobody knows.
  EXPECT_DOUBLE_EQ(measured_profile({spans.begin() + 1, spans.end()}, units(), 1).rest_ms, 0);
}

}  // namespace
}  // namespace tessera::capture::measured_profile_test
