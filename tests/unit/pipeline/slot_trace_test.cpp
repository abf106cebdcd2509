// Traces and pictures of simulated schedules; costs that come back out of a trace.
#include "pipeline/slot_trace.h"

#include <gmock/gmock.h>

#include "pipeline/kinds.h"
#include "pipeline/picture.h"
#include "tessera/error.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::pipeline::slot_trace_test {
namespace {

using ::testing::HasSubstr;

Costs random_costs(const Schedule& schedule, testing::Dice& dice) {
  Costs costs(static_cast<std::size_t>(schedule.stages()));
  for (StageCosts& one : costs) {
    // Whole microseconds: a trace holds them without rounding.
    const auto cost = [&] { return (1.0 + dice.roll(5000)) / 8.0; };
    one = {.forward = cost(),
           .input_gradient = cost(),
           .weight_gradient = cost(),
           .backward = cost(),
           .beside = cost(),
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
  EXPECT_DOUBLE_EQ(*measured[0].beside, 1.0 + 2.5);
  EXPECT_DOUBLE_EQ(measured[3].forward, 4.0);
  EXPECT_NEAR(simulate(dual, measured).makespan, simulate(dual, costs).makespan, 1e-4);
  // The other way round something is missing, and the message says what.
  const Schedule plain = make_schedule(Kind::kOneFOneB, {4, 1, 6});
  const std::string whole = trace_of(plain, simulate(plain, costs));
  try {
    costs_from_trace(whole, "t.json", zero_bubble);
    ADD_FAILURE() << "found I and W in a trace of B";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_THAT(error.what(), HasSubstr("t.json: found no span of the row 'slots' with stage "));
  }
}

// A message of two tensors on its way for 2 ms in three micro-batches: the receiver stood waiting in
// one, came 40 ms late to another and was held up for 0.2 ms there, and 0.5 ms late to the third. Naive: the mean of what both ends
// saw, tensor by tensor, makes 15 ms of it.
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
  EXPECT_DOUBLE_EQ(cost(), 2.5) << "the shortest, where nobody waited";
  message(2, 110.0, 112.0, 1.5);
  EXPECT_DOUBLE_EQ(cost(), 2.0);
}

TEST(SlotTrace, RefusesTimesThatNoClockHolds) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {1, 1, 1});
  Costs costs(1);
  costs[0].forward = 8e12;
  EXPECT_THAT(trace_of(schedule, simulate(schedule, costs)), HasSubstr("0F0"));
  for (const double cost : {9.1e12, 1e300}) {
    costs[0].forward = cost;
    try {
      trace_of(schedule, simulate(schedule, costs));
      ADD_FAILURE() << "wrote " << cost;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("trace: found a makespan of "));
    }
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
        EXPECT_THAT(picture, HasSubstr("<title>" + to_string(slot) + ", "));
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
}  // namespace tessera::pipeline::slot_trace_test
