// The simulator's results for a plan, compared with counts by hand; profiles and their files.
#include "capture/simulate_plan.h"

#include <nlohmann/json.hpp>

#include "base/text/printable.h"
#include "capture/measured_profile.h"
#include "fsdp/agreed/step_plan_check.h"
#include "support/test.h"
#include "unit/fsdp/drawn_plan.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::simulate_plan_test {
namespace {

using fsdp::flat;
using fsdp::Keep;
using fsdp::PlanOrder;
using fsdp::ReduceAt;

fsdp::StepPlan plan_of(std::vector<Keep> keep, std::size_t ahead) {
  const fsdp::PlanChoices choices{std::move(keep), ReduceAt::kLastBackward, ahead, ahead};
  return make_plan(fsdp::record_of({flat({0, 1, 2})}), fsdp::units_of(3), choices,
                   PlanOrder::kOneAfterTheOther);
}

PlanProfile profile_of_three(double gather, double reduce) {
  PlanProfile profile;
  for (const auto& unit : fsdp::units_of(3)) {
    profile.units.push_back({unit.name, 1.0, 2.0, gather, reduce});
  }
  return profile;
}

// Nothing ahead: five gathers of the three units are waited for, one after the other, and each
// reduction holds up its rank. 3 x (1 + 2) + 5 x 4 + 3 x 1.
TEST(SimulatePlan, WithoutPrefetchEveryGatherIsWaitedFor) {
  const auto step =
      simulate(plan_of({Keep::kUpdate, Keep::kNot, Keep::kNot}, 0), profile_of_three(4.0, 1.0), 1);
  EXPECT_EQ(step.gathers, 5);
  EXPECT_EQ(step.reductions, 3);
  EXPECT_DOUBLE_EQ(step.compute_ms, 9.0);
  EXPECT_DOUBLE_EQ(step.waited_ms, 20.0);
  EXPECT_DOUBLE_EQ(step.reduced_ms, 3.0);
  EXPECT_DOUBLE_EQ(step.step_ms, 32.0);
  EXPECT_EQ(step.peak_bytes, 10 + 12);
}

// With one ahead, a gather hides behind the unit before it, but not behind the root around all,
// whose own forward comes when its units have ended: nothing hides the root's and the first unit's.
TEST(SimulatePlan, WhatComputesHidesWhatIsGatheredAhead) {
  const auto plan = plan_of({Keep::kUpdate, Keep::kNot, Keep::kBackward}, 1);
  const auto step = simulate(plan, profile_of_three(0.5, 0.0), 1);
  EXPECT_EQ(step.gathers, 4);
  EXPECT_DOUBLE_EQ(step.waited_ms, 2 * 0.5);
  EXPECT_DOUBLE_EQ(step.step_ms, 9.0 + 2 * 0.5);
  EXPECT_EQ(step.peak_bytes, fsdp::peak_gathered_bytes(plan));
}

// A step is a plan's part and what no plan changes, which comes once however many micro-batches
// there are. Naive: reductions take the gathers' place on their way, and those wait for them.
TEST(SimulatePlan, WaitsForReductionsAndTheRestOfTheStepComeOnTop) {
  auto profile = profile_of_three(0.0, 5.0);
  profile.rest_ms = 4.0;
  const auto plan = plan_of({Keep::kUpdate, Keep::kUpdate, Keep::kUpdate}, 1);
  const auto step = simulate(plan, profile, 1);
  EXPECT_DOUBLE_EQ(step.step_ms, 3 * (1.0 + 2.0) + 3 * 5.0 + 4.0);
  EXPECT_DOUBLE_EQ(step.reduced_ms, 15.0);
  EXPECT_DOUBLE_EQ(step.rest_ms, 4.0);
  const auto many = simulate(plan, profile, 100);
  EXPECT_DOUBLE_EQ(many.step_ms, 100 * 9.0 + 15.0 + 4.0) << "the last one reduces";
}

// Holds also for more micro-batches than are simulated one by one, where each reduces.
TEST(SimulatePlan, EveryReductionOfManyMicroBatchesIsWaitedFor) {
  const fsdp::PlanChoices choices{std::vector(3, Keep::kUpdate), ReduceAt::kEveryBackward, 1, 1};
  const auto plan = make_plan(fsdp::record_of({flat({0, 1, 2})}), fsdp::units_of(3), choices,
                              PlanOrder::kOneAfterTheOther);
  const auto step = simulate(plan, profile_of_three(0.0, 5.0), 100);
  EXPECT_EQ(step.reductions, 300);
  EXPECT_DOUBLE_EQ(step.reduced_ms, 300 * 5.0);
  EXPECT_DOUBLE_EQ(step.step_ms, 100 * 9.0 + 300 * 5.0);
}

// Many micro-batches are not gone through one by one, and come to the same.
TEST(SimulatePlan, ManyMicroBatchesTakeAsLongAsEachOfThem) {
  const auto plan = plan_of({Keep::kUpdate, Keep::kNot, Keep::kBackward}, 1);
  const auto profile = profile_of_three(1.5, 0.25);
  const auto at = [&](std::int64_t count) { return simulate(plan, profile, count); };
  const double each = at(8).step_ms - at(7).step_ms;
  EXPECT_NEAR(at(1000).step_ms, at(8).step_ms + 992 * each, 1e-6);
  EXPECT_EQ(at(1000).gathers, at(8).gathers + 992 * (at(8).gathers - at(7).gathers));
  EXPECT_EQ(at(1000).curve.size(), at(8).curve.size());
  EXPECT_EQ(at(1000).peak_bytes, at(3).peak_bytes);
}

TEST(SimulatePlan, CurveHasThePeakAndIsDrawn) {
  const auto plan = plan_of({Keep::kUpdate, Keep::kNot, Keep::kBackward}, 1);
  const auto step = simulate(plan, profile_of_three(0.5, 0.0), 2);
  std::int64_t most = 0;
  for (const auto& point : step.curve) most = std::max(most, point.bytes);
  EXPECT_EQ(most, step.peak_bytes);
  const auto drawn = picture(step, 40, 4);
  EXPECT_EQ(std::ranges::count(drawn, '\n'), 4);
  EXPECT_THAT(drawn, Says("33 B"));
  EXPECT_EQ(std::ranges::count(drawn, '|'), 4) << "one line between two micro-batches";
}

TEST(SimulatePlan, SeveralStagesAreASchedules) {
  fsdp::StepRecord record;
  record.stages.resize(2);
  record.stages[0] = record.stages[1] = {{flat({0})}, {{true}}};
  const auto plan = make_plan(record, fsdp::units_of(1), {{Keep::kUpdate}, ReduceAt::kAsked, 1, 1},
                              PlanOrder::kAny);
  EXPECT_THROW(simulate(plan, default_profile(plan.units), 1), Error);
}

// Five gathers that nothing hides are waited for 20 ms by their shortest; the step stood 30, or 10.
TEST(SimulatePlan, GathersAreAsLongAsTheMeasuredStepWaitedForThem) {
  const auto plan = plan_of({Keep::kUpdate, Keep::kNot, Keep::kNot}, 0);
  auto profile = profile_of_three(4.0, 1.0);
  EXPECT_EQ(as_waited(profile, plan, 1), profile) << "it was not measured";
  profile.units[1].gather_ms.reset();
  profile.collective = {.latency_ms = 4.0};
  for (const double waited : {30.0, 10.0, 0.0}) {
    profile.gathers_waited_ms = waited;
    const auto found = as_waited(profile, plan, 1);
    EXPECT_NEAR(simulate(plan, found, 1).waited_ms, waited, 1e-6);
    EXPECT_NEAR(*found.units[0].gather_ms, 4.0 * waited / 20.0, 1e-6);
    EXPECT_FALSE(found.units[1].gather_ms.has_value());
    EXPECT_EQ(found.units[0].reduce_ms, 1.0) << "their waits are what was measured";
  }
}

// Naive: a step that waited for nothing has gathers that take nothing, and keeps none.
TEST(SimulatePlan, GathersThatWereHiddenStayAsLongAsHidesThem) {
  const auto plan = plan_of({Keep::kUpdate, Keep::kNot, Keep::kBackward}, 1);
  auto profile = profile_of_three(0.5, 0.0);
  const double waited = simulate(plan, profile, 1).waited_ms;
  profile.gathers_waited_ms = waited;
  const auto found = as_waited(profile, plan, 1);
  EXPECT_NEAR(*found.units[0].gather_ms, 0.5, 1e-6);
  // More than any factor makes of it: nothing of this model's.
  profile.gathers_waited_ms = 1e6;
  EXPECT_EQ(as_waited(profile, plan, 1), profile);
}

// ---------------------------------------------------------------------------------------- profiles

TEST(PlanProfile, FilesReadBackAndCutOnesAreRefused) {
  PlanProfile profile = profile_of_three(0.5, 0.25);
  profile.units[1].gather_ms.reset();
  profile.collective = {0.1, 1e-7};
  profile.rest_ms = 2.5;
  profile.units[2].blocks = {RecomputeMode::kSelective, {.entries = 100, .running = 164}};
  profile.gathers_waited_ms = 1.25;
  auto text = to_json(profile);
  EXPECT_EQ(parse_profile(text, "x"), profile);
  text.pop_back();
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_THROW(parse_profile(text.substr(0, size), "x"), Error) << size;
  }
  const auto with = [&](const char* pointer, const nlohmann::json& value) -> std::string {
    auto whole = nlohmann::json::parse(text);
    whole[nlohmann::json::json_pointer(pointer)] = value;
    return refusal_of(ErrorKind::kFormat, [&] { parse_profile(whole.dump(), "x"); });
  };
  EXPECT_THAT(with("/units/0/forward_ms", -1), Says("'forward_ms': found '-1'"));
  EXPECT_THAT(with("/units/0/name", "layer 1"), Says("each unit once"));
  EXPECT_THAT(with("/version", 3), Says("expected version 1"));
  EXPECT_THAT(with("/rest_ms", -1), Says("'rest_ms': found '-1'"));
  EXPECT_THAT(with("/units/2/blocks/recompute", "some"), Says("\"selective\" or \"full\""));
  EXPECT_THAT(with("/units/2/blocks/running", 99), Says("no less than the entries"));
  EXPECT_THAT(with("/units/2/blocks/entries", -1), Says("'entries': found '-1'"));
}

TEST(PlanProfile, FilesAreWrittenAsTheyWere) {
  PlanProfile profile;
  profile.units = {{.name = "(root)", .forward_ms = 1.5, .backward_ms = 3, .gather_ms = 0.25},
                   {.name = "layer 1", .reduce_ms = 2.0}};
  profile.units[1].blocks = {RecomputeMode::kSelective, {.entries = 100, .running = 164}};
  profile.collective = {0.05, 1e-6};
  EXPECT_EQ(to_json(profile), R"json({
  "format": "tessera-profile",
  "version": 1,
  "collective": {"latency_ms":0.05,"ms_per_byte":1e-06},
  "rest_ms": 0.0,
  "units": [
    {"name":"(root)","forward_ms":1.5,"backward_ms":3.0,"gather_ms":0.25,"reduce_ms":null},
    {"name":"layer 1","forward_ms":0.0,"backward_ms":0.0,"gather_ms":null,"reduce_ms":2.0,"blocks":{"recompute":"selective","entries":100,"running":164}}
  ]
}
)json");
  profile.gathers_waited_ms = 7.0;
  EXPECT_THAT(to_json(profile), Says(R"(,
  "rest_ms": 0.0,
  "gathers_waited_ms": 7.0,
  "units": [)"));
}

// Naive: the longest of each place, which no rank took: where one computes the other waits.
TEST(PlanProfile, TheRankThatComputesLongestCountsWithItsWaits) {
  auto one = profile_of_three(1.0, 1.0);
  auto other = profile_of_three(2.0, 5.0);
  one.units[0].forward_ms = 7.0;
  other.units[1].backward_ms = 3.0;
  other.rest_ms = 9.0;
  EXPECT_EQ(slowest_of({one, other}), one);
  EXPECT_EQ(slowest_of({other, one}), one);
  other.units[1].name = "layer 9";
  EXPECT_THROW(slowest_of({one, other}), Error);
}

TEST(PlanProfile, ALineIsFittedThroughWhatWasMeasured) {
  const std::vector<Measured> exact{{0, 0.5}, {1000, 1.5}, {3000, 3.5}};
  EXPECT_NEAR(fit(exact).latency_ms, 0.5, 1e-12);
  EXPECT_NEAR(fit(exact).ms_per_byte, 1e-3, 1e-15);
  // Never a message that takes less the larger it is, nor less than nothing.
  EXPECT_EQ(fit(std::vector<Measured>{{1000, 2.0}, {2000, 1.0}}).ms_per_byte, 0.0);
  EXPECT_EQ(fit(std::vector<Measured>{{1000, 0.1}, {2000, 1.0}}).latency_ms, 0.0);
  EXPECT_EQ(fit({}), CollectiveCost());
}

TEST(PlanProfile, AUnitWithoutCostsIsNamed) {
  const auto profile = profile_of_three(1.0, 1.0);
  EXPECT_REFUSED(kConfig, profile_of(profile, fsdp::units_of(4), "p.json"),
                 "p.json: found no costs of unit 'layer 3'");
}

// The costs of units in a traced step.

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
  // Without the step's own span it is unknown.
  EXPECT_DOUBLE_EQ(measured_profile({spans.begin() + 1, spans.end()}, units(), 1).rest_ms, 0);
}

}  // namespace
}  // namespace tessera::capture::simulate_plan_test
