// Makespans, bubbles and memory: those that were recorded, those of the papers' formulas, and those
// that follow by hand.
#include "pipeline/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "pipeline/kinds.h"
#include "tessera/error.h"
#include "unit/pipeline/random_schedule.h"
#include "unit/pipeline/recorded.h"

namespace tessera::pipeline::simulate_test {
namespace {

Costs costs_of(int stages, double forward, double input, double weight,
               std::optional<double> beside = {}) {
  StageCosts one;
  one.forward = forward;
  one.input_gradient = input;
  one.weight_gradient = weight;
  one.beside = beside;
  return Costs(static_cast<std::size_t>(stages), one);
}

// Makespan, idle time and peaks of all recorded schedules, under their three costs.
TEST(Simulate, GivesTheRecordedTimesAndPeaks) {
  int compared = 0;
  for (const testing::Recorded& recorded : testing::recorded_schedules()) {
    const Schedule schedule = make_schedule(kind_named(recorded.schedule), recorded.shape);
    const int stages = schedule.stages();
    const std::vector<std::pair<std::string, Costs>> all{
        {"F=1,I=1,W=1,F&B=F+I+W", costs_of(stages, 1, 1, 1)},
        {"F=1,I=1,W=1,F&B=2.5", costs_of(stages, 1, 1, 1, 2.5)},
        {"F=2,I=2,W=1,F&B=F+I+W", costs_of(stages, 2, 2, 1)}};
    ASSERT_EQ(recorded.sim.size(), all.size());
    for (const auto& [name, costs] : all) {
      const Simulated simulated = simulate(schedule, costs);
      const auto& expected = recorded.sim.at(name);
      EXPECT_EQ(simulated.makespan, expected.at("total").get<double>()) << recorded.name() << name;
      for (std::size_t rank = 0; rank < simulated.ranks.size(); ++rank) {
        EXPECT_EQ(simulated.ranks[rank].idle,
                  expected.at("idle").at(std::to_string(rank)).get<double>())
            << recorded.name() << ' ' << name << " rank " << rank;
        EXPECT_EQ(simulated.ranks[rank].peak_live_chunks, recorded.peak_chunks[rank]);
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 3 * (3 * 1 + 9 * 2 + 2 * 3 + 9 * 4 + 2 * 8));
}

// (ranks - 1)(F + B) of 1F1B, (ranks - 1)(F&B + B - 3W) of DualPipeV, where F and I cost the same:
// the formulas of their papers.
TEST(Simulate, BubblesAreThoseOfThePapers) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const int micro_batches = 3 * ranks;
    for (const auto& [forward, input, weight] :
         std::vector<std::array<double, 3>>{{1, 1, 1}, {2, 2, 1}, {3, 3, 2}, {3, 4, 2}}) {
      const double backward = input + weight;
      const auto idle_of = [&](Kind kind) {
        const Schedule schedule =
            make_schedule(kind, {ranks, row_of(kind).stages_per_rank, micro_batches});
        const Simulated simulated =
            simulate(schedule, costs_of(schedule.stages(), forward, input, weight));
        return simulated.ranks[0].idle;
      };
      EXPECT_EQ(idle_of(Kind::kOneFOneB), (ranks - 1) * (forward + backward));
      EXPECT_EQ(idle_of(Kind::kGPipe), (ranks - 1) * (forward + backward));
      if (forward == input) {
        EXPECT_EQ(idle_of(Kind::kDualPipeV),
                  (ranks - 1) * (forward + backward + backward - 3 * weight));
      }
      if (forward == input && input == weight) {
        EXPECT_EQ(idle_of(Kind::kZeroBubble), (ranks - 1) * (forward + backward - 2 * weight));
        EXPECT_EQ(idle_of(Kind::kZeroBubbleV), ranks - 1) << "until the first F arrives";
      }
    }
  }
}

// Two ranks, one micro-batch: F, message, F, B, message, B.
TEST(Simulate, MessagesTakeTheirTime) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 1});
  Costs costs = costs_of(2, 1, 1, 1);
  costs[0].send_forward = 10;
  costs[1].send_backward = 100;
  const Simulated simulated = simulate(schedule, costs);
  EXPECT_EQ(simulated.makespan, 1 + 10 + 1 + 2 + 100 + 2);
  ASSERT_EQ(simulated.messages.size(), 2U);
  EXPECT_EQ(simulated.messages[0].sent, 1);
  EXPECT_EQ(simulated.messages[0].posted, 0);
  EXPECT_EQ(simulated.messages[0].arrived, 11);
  EXPECT_EQ(simulated.ranks[0].most_open_sends, 1);
  EXPECT_EQ(simulated.ranks[0].slots[1].begin, 114);
}

// Rank 1 posts the receive of its third F behind its first: the message waits for that.
TEST(Simulate, MessagesWaitForTheirReceives) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 4});
  Costs costs = costs_of(2, 1, 1, 1);
  costs[1].forward = 10;
  costs[0].send_forward = 1;
  const Simulated early = simulate(lower(schedule, 3), costs);
  const Simulated ahead = simulate(lower(schedule, 1), costs);
  const Simulated late = simulate(lower(schedule, 0), costs);
  EXPECT_EQ(early.makespan, ahead.makespan);
  EXPECT_EQ(late.makespan, ahead.makespan + 3) << "three messages are not hidden";
  EXPECT_EQ(ahead.ranks[0].most_open_sends, 2) << "the first two are taken at once";
  EXPECT_EQ(early.ranks[0].most_open_sends, 1);
}

// GPipe holds all micro-batches of a stage; put-off weight gradients keep their own bytes, also
// more than the micro-batch had before.
TEST(Simulate, CountsLiveAndDeferredBytes) {
  Costs costs = costs_of(2, 1, 1, 1);
  costs[0].live_bytes = 100;
  costs[1].live_bytes = 10;
  const Simulated gpipe = simulate(make_schedule(Kind::kGPipe, {2, 1, 5}), costs);
  EXPECT_EQ(gpipe.ranks[0].peak_bytes, 500);
  EXPECT_EQ(gpipe.ranks[1].peak_bytes, 50);
  EXPECT_EQ(gpipe.ranks[1].peak_deferred_bytes, 0);
  // Rank 1 of ZB1P: 1F0 1I0 1F1 1I1 1W0 ..., one W is put off always, two for a moment.
  costs[1].deferred_bytes = 70;
  const Simulated zero = simulate(make_schedule(Kind::kZeroBubble, {2, 1, 4}), costs);
  EXPECT_EQ(zero.ranks[1].peak_deferred_bytes, 140);
  EXPECT_EQ(zero.ranks[1].peak_bytes, 140);
  EXPECT_EQ(zero.ranks[0].peak_bytes, 200);
}

// Of any schedule: no rank does two things at once, nothing before it is there, busy and idle are
// the makespan, and costlier slots make nothing earlier.
TEST(Simulate, OfRandomSchedulesIsPossible) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    testing::Dice dice(seed);
    const Schedule schedule = testing::random_schedule(dice, testing::MicroBatchOrder::kAny);
    Costs costs(static_cast<std::size_t>(schedule.stages()));
    for (StageCosts& one : costs) {
      one = {.forward = 1.0 + dice.roll(5),
             .input_gradient = 1.0 + dice.roll(5),
             .weight_gradient = 1.0 + dice.roll(5),
             .send_forward = 0.0 + dice.roll(3),
             .send_backward = 0.0 + dice.roll(3)};
    }
    const Simulated simulated = simulate(schedule, costs);
    double work = 0.0;
    for (const SimulatedRank& rank : simulated.ranks) {
      EXPECT_EQ(rank.busy + rank.idle, simulated.makespan);
      work = std::max(work, rank.busy);
      for (std::size_t i = 1; i < rank.slots.size(); ++i) {
        EXPECT_GE(rank.slots[i].begin, rank.slots[i - 1].end) << "seed " << seed;
      }
    }
    EXPECT_GE(simulated.makespan, work);
    for (const SimulatedMessage& message : simulated.messages) {
      EXPECT_TRUE(is_message(message.what, schedule));
      EXPECT_LE(std::max(message.sent, message.posted), message.arrived);
    }
    costs[static_cast<std::size_t>(dice.roll(schedule.stages()))].forward += 3.0;
    EXPECT_GE(simulate(schedule, costs).makespan, simulated.makespan) << "seed " << seed;
  }
}

TEST(Simulate, RefusesCostsThatMeanNothing) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 2});
  EXPECT_THROW(simulate(schedule, costs_of(3, 1, 1, 1)), Error);
  EXPECT_THROW(simulate(schedule, costs_of(2, -1, 1, 1)), Error);
  EXPECT_THROW(simulate(schedule, costs_of(2, 1, 1, std::numeric_limits<double>::infinity())),
               Error);
  EXPECT_THROW(simulate(schedule, costs_of(2, 1, std::nan(""), 1)), Error);
}

}  // namespace
}  // namespace tessera::pipeline::simulate_test
