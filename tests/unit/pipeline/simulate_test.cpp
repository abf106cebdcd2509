// Makespans, bubbles and memory: those that were recorded, those of the papers' formulas, and those
// that follow by hand.

#include "pipeline/simulate.h"

#include <cmath>
#include <limits>

#include "pipeline/kinds.h"
#include "pipeline/picture.h"
#include "pipeline/slot_trace.h"
#include "support/test.h"
#include "unit/pipeline/random_schedule.h"
#include "unit/pipeline/recorded.h"

namespace tessera::pipeline::simulate_test {
namespace {

Costs costs_of(int stages, double forward, double input, double weight,
               std::optional<double> paired = {}) {
  StageCosts one;
  one.forward = forward;
  one.input_gradient = input;
  one.weight_gradient = weight;
  one.paired = paired;
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

// A micro-batch passes all ranks forward and back, each other one takes a pair more.
TEST(Simulate, Paired1F1BTakesAPairAMicroBatch) {
  for (const auto& [forward, input, weight] :
       std::vector<std::array<double, 3>>{{1, 1, 1}, {2, 2, 1}, {3, 4, 2}}) {
    const double both = forward + input + weight;
    for (const double pair : {both, both - 0.5, std::max(forward, input + weight)}) {
      for (int ranks = 1; ranks <= 8; ++ranks) {
        const Costs costs = costs_of(ranks, forward, input, weight, pair);
        for (int micro_batches = 1; micro_batches <= 20; ++micro_batches) {
          const Schedule schedule = make_schedule(Kind::kPairedOneFOneB, {ranks, 1, micro_batches});
          EXPECT_EQ(simulate(schedule, costs).makespan, ranks * both + (micro_batches - 1) * pair)
              << ranks << " ranks, " << micro_batches << " micro-batches, " << pair;
        }
      }
    }
  }
}

// On several ranks DualPipeV, whose stages are half as large, takes less, on one rank more.
TEST(Simulate, Paired1F1BAgainstOtherKinds) {
  const auto makespans = [](Kind kind, int ranks, int micro_batches) {
    std::vector<double> found;
    for (const double pair : {3.0, 2.0}) {
      const int stages = row_of(kind).stages_per_rank;
      const Schedule schedule = make_schedule(kind, {ranks, stages, micro_batches});
      const double each = 1.0 / stages;
      found.push_back(
          simulate(schedule, costs_of(schedule.stages(), each, each, each, pair * each)).makespan);
    }
    return found;
  };
  const std::vector<std::pair<int, int>> shapes{{1, 8}, {2, 8}, {4, 8}, {4, 16}};
  std::vector<std::vector<double>> paired, alone, dual;
  for (const auto& [ranks, micro_batches] : shapes) {
    paired.push_back(makespans(Kind::kPairedOneFOneB, ranks, micro_batches));
    alone.push_back(makespans(Kind::kOneFOneB, ranks, micro_batches));
    dual.push_back(makespans(Kind::kDualPipeV, ranks, micro_batches));
  }
  EXPECT_THAT(paired, ElementsAre(ElementsAre(24, 17), ElementsAre(27, 20), ElementsAre(33, 26),
                                  ElementsAre(57, 42)));
  EXPECT_THAT(alone, ElementsAre(ElementsAre(24, 24), ElementsAre(27, 27), ElementsAre(33, 33),
                                 ElementsAre(57, 57)));
  EXPECT_THAT(dual, ElementsAre(ElementsAre(24, 17.5), ElementsAre(25, 19), ElementsAre(27, 22),
                                ElementsAre(51, 38)));
}

// F and B alone wait for all of their exchanges; pairs for what their turns leave of them, or for
// what a given cost has above their computation.
TEST(Simulate, CountsWhatExchangesExpose) {
  const Schedule schedule = make_schedule(Kind::kPairedOneFOneB, {2, 1, 4});
  const StageCosts computing{.forward = 8, .input_gradient = 5, .weight_gradient = 5};
  StageCosts stage =
      with_exchanges(computing, {.forward = 1, .backward = 1, .layers = 1, .cost = 3});
  EXPECT_EQ(stage.forward_pieces, (Pieces{{4, 3}, {4, 0}}));
  EXPECT_EQ(stage.forward, 11);
  EXPECT_EQ(stage.input_gradient, 8);
  EXPECT_EQ(stage.weight_gradient, 5);
  const auto expect_each = [&](double makespan, std::vector<double> exposed) {
    const Simulated simulated = simulate(schedule, {stage, stage});
    EXPECT_DOUBLE_EQ(simulated.makespan, makespan);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      EXPECT_DOUBLE_EQ(simulated.ranks[rank].exposed_exchange, exposed[rank]);
      EXPECT_DOUBLE_EQ(simulated.ranks[rank].hidden_exchange, 24 - exposed[rank]);
    }
  };
  // A pair computes for 18 without standing: three F and B alone on rank 0, one on rank 1.
  expect_each(2 * 24 + 3 * 18, {18, 6});
  stage.paired = 20;
  expect_each(2 * 24 + 3 * 20, {18 + 2, 6 + 3 * 2});
  stage.paired = 16;
  expect_each(2 * 24 + 3 * 16, {18, 6});
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
  // Rank 1 of ZB1P: 1F0 1I0 1F1 1I1 1W0 ..., one W is always deferred, two for a moment.
  costs[1].deferred_bytes = 70;
  const Simulated zero = simulate(make_schedule(Kind::kZeroBubble, {2, 1, 4}), costs);
  EXPECT_EQ(zero.ranks[1].peak_deferred_bytes, 140);
  EXPECT_EQ(zero.ranks[1].peak_bytes, 140);
  EXPECT_EQ(zero.ranks[0].peak_bytes, 200);
}

// For any schedule: no rank does two things at once, nothing runs before its inputs, busy and idle
// are the makespan, and costlier slots make nothing earlier.
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

// Traces and pictures of simulated schedules; costs that come back out of a trace.

Costs random_costs(const Schedule& schedule, testing::Dice& dice) {
  Costs costs(static_cast<std::size_t>(schedule.stages()));
  for (StageCosts& one : costs) {
    // Whole microseconds: a trace holds them without rounding.
    const auto cost = [&] { return (1.0 + dice.roll(5000)) / 8.0; };
    one = {.forward = cost(),
           .input_gradient = cost(),
           .weight_gradient = cost(),
           .backward = cost(),
           .paired = cost(),
           .send_forward = cost(),
           .send_backward = cost()};
  }
  return costs;
}

// A schedule that is simulated with the costs of its own trace takes as long as before.
TEST(SlotTrace, CostsComeBack) {
  for (const KindRow& row : kinds()) {
    testing::Dice dice(7);
    const Schedule schedule = make_schedule(row.kind, {3, row.stages_per_rank, 9});
    const Simulated simulated = simulate(schedule, random_costs(schedule, dice));
    const Costs measured = costs_from_trace(trace_of(schedule, simulated), "t.json", schedule);
    const Simulated again = simulate(schedule, measured);
    // A trace's smallest step is a nanosecond; less than 200 of them stand one after the other.
    EXPECT_NEAR(again.makespan, simulated.makespan, 1e-6 * 200) << row.name;
    for (std::size_t rank = 0; rank < simulated.ranks.size(); ++rank) {
      EXPECT_NEAR(again.ranks[rank].idle, simulated.ranks[rank].idle, 1e-6 * 200) << row.name;
    }
  }
}

// A trace of one kind predicts another, where it has the parts.
TEST(SlotTrace, PartsMakeUpTheWhole) {
  const Schedule zero_bubble = make_schedule(Kind::kZeroBubbleV, {2, 2, 6});
  Costs costs(4);
  for (std::size_t stage = 0; stage < 4; ++stage) {
    costs[stage].forward = 1.0 + static_cast<double>(stage);
    costs[stage].input_gradient = 2.0;
    costs[stage].weight_gradient = 0.5;
  }
  const std::string trace = trace_of(zero_bubble, simulate(zero_bubble, costs));
  const Schedule dual = make_schedule(Kind::kDualPipeV, {2, 2, 6});
  const Costs measured = costs_from_trace(trace, "t.json", dual);
  EXPECT_DOUBLE_EQ(measured[3].of_backward(), 2.5);
  EXPECT_DOUBLE_EQ(*measured[0].paired, 1.0 + 2.5);
  EXPECT_DOUBLE_EQ(measured[3].forward, 4.0);
  EXPECT_NEAR(simulate(dual, measured).makespan, simulate(dual, costs).makespan, 1e-4);
  // The other way round something is missing, and the message says what.
  const Schedule plain = make_schedule(Kind::kOneFOneB, {4, 1, 6});
  const std::string whole = trace_of(plain, simulate(plain, costs));
  EXPECT_REFUSED(kFormat, costs_from_trace(whole, "t.json", zero_bubble),
                 "t.json: found no span of the row 'slots' with stage ");
}

// A message of two tensors takes 2 ms in three micro-batches: the receiver waited in one, came 40
// ms late to another and was held up for 0.2 ms there, and came 0.5 ms late to the third. Naive:
// the mean of what both ends saw, tensor by tensor, is 15 ms.
TEST(SlotTrace, AReceiverThatComesLateMakesNoMessageLonger) {
  std::string events = R"({"ph": "X", "cat": "slots", "name": "0F0", "dur": 1000},
                          {"ph": "X", "cat": "slots", "name": "1F0", "dur": 1000})";
  const auto add = [&](const char* name, int micro_batch, int tensor, double begin, double end,
                       double waited) {
    events += concat(R"(, {"ph": "X", "cat": "messages", "name": ")", name, micro_batch,
                     R"(", "ts": )", begin * 1000, R"(, "dur": )", (end - begin) * 1000,
                     R"(, "args": {"tensor": )", tensor, R"(, "waited_ms": )", waited, "}}");
  };
  const auto message = [&](int micro_batch, double sent, double taken, double waited) {
    for (const int tensor : {0, 1}) {
      // The second tensor leaves and comes 1 ms after the first.
      add("0SEND_F", micro_batch, tensor, sent + tensor, sent + 100, 0.0);
      add("1RECV_F", micro_batch, tensor, sent - 1, taken - 1 + tensor, waited);
    }
  };
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 3});
  Schedule forwards = schedule;
  for (auto& slots : forwards.slots) {
    std::erase_if(slots, [](const Slot& slot) { return slot.action.kind != ActionKind::kForward; });
  }
  const auto cost = [&] {
    const auto costs =
        costs_from_trace(concat(R"({"traceEvents": [)", events, "]}"), "t.json", forwards);
    return costs[0].send_forward;
  };
  message(0, 10.0, 52.0, 0.2);
  message(1, 60.0, 62.5, 0.001);
  EXPECT_DOUBLE_EQ(cost(), 2.5) << "the shortest, where no rank waited";
  message(2, 110.0, 112.0, 1.5);
  EXPECT_DOUBLE_EQ(cost(), 2.0);
}

TEST(SlotTrace, RefusesTimesThatNoClockHolds) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 1});
  Costs costs(1);
  costs[0].forward = 8e12;
  EXPECT_THAT(trace_of(schedule, simulate(schedule, costs)), Says("0F0"));
  for (const double cost : {9.1e12, 1e300}) {
    costs[0].forward = cost;
    EXPECT_REFUSED(kUsage, trace_of(schedule, simulate(schedule, costs)),
                   "trace: found a makespan of ");
  }
}

TEST(SlotTrace, RefusesWhatIsNoTrace) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 1});
  for (const char* text :
       {"", "[]", "{}", R"({"traceEvents": 3})", R"({"traceEvents": []})",
        R"({"traceEvents": [{"ph": "X", "cat": "slots", "name": "zero", "dur": 1}]})",
        R"({"traceEvents": [{"ph": "X", "cat": "slots", "name": "0F0"}]})",
        R"({"traceEvents": [{"ph": "X", "cat": "slots", "name": "0F0", "dur": -1}]})",
        R"({"traceEvents": [{"ph": "X", "cat": "messages", "name": "0F0", "dur": 1}]})"}) {
    EXPECT_THROW(costs_from_trace(text, "t.json", schedule), Error) << text;
  }
  const Costs measured = costs_from_trace(
      R"({"traceEvents": [{"ph": "M", "name": "thread_name"},
          {"ph": "X", "cat": "compute", "name": "step", "dur": 9000},
          {"ph": "X", "cat": "slots", "name": "0F0", "dur": 1000},
          {"ph": "X", "cat": "slots", "name": "0F0", "dur": 3000},
          {"ph": "X", "cat": "slots", "name": "0B0", "dur": 1000, "args": {"uncut_ms": 5.5}}]})",
      "t.json", schedule);
  EXPECT_DOUBLE_EQ(measured[0].forward, 2.0);
  EXPECT_DOUBLE_EQ(measured[0].of_backward(), 5.5);
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

// Every slot has its box, or two, and its title; what is opened is closed.
TEST(Picture, HasEverySlot) {
  for (const KindRow& row : kinds()) {
    const Schedule schedule = make_schedule(row.kind, {2, row.stages_per_rank, 6});
    const Simulated simulated =
        simulate(schedule, Costs(static_cast<std::size_t>(schedule.stages())));
    const std::string picture = to_svg(schedule, simulated);
    int slots = 0;
    int actions = 0;
    for (const auto& list : schedule.slots) {
      for (const Slot& slot : list) {
        ++slots;
        slot.each([&](const Action&) { ++actions; });
        EXPECT_THAT(picture, Says("<title>" + to_string(slot) + ", "));
      }
    }
    EXPECT_EQ(count(picture, "<title>"), slots) << row.name;
    EXPECT_EQ(count(picture, "<rect "), actions + 1 + 4) << "boxes, paper and legend";
    for (const char* element : {"svg", "g", "title", "text"}) {
      EXPECT_EQ(count(picture, std::string("<") + element + ">") +
                    count(picture, std::string("<") + element + " "),
                count(picture, std::string("</") + element + ">"))
          << element;
    }
  }
}

// Costs of nothing draw a picture, too.
TEST(Picture, OfNoTimeHasASize) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 1});
  StageCosts nothing;
  nothing.forward = nothing.input_gradient = nothing.weight_gradient = 0.0;
  const std::string picture = to_svg(schedule, simulate(schedule, {nothing}));
  EXPECT_EQ(picture.find("nan"), std::string::npos);
  EXPECT_EQ(picture.find("inf\""), std::string::npos);
}

}  // namespace
}  // namespace tessera::pipeline::simulate_test
