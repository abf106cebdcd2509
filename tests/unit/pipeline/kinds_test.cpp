// Every kind gives the lists that were recorded or that its paper draws, and refuses with numbers
// what it cannot be.

#include "pipeline/kinds.h"

#include <optional>
#include <tuple>

#include "pipeline/schedule_csv.h"
#include "pipeline/split.h"
#include "pipeline/validate.h"
#include "support/test.h"
#include "unit/pipeline/random_schedule.h"
#include "unit/pipeline/recorded.h"

namespace tessera::pipeline::kinds_test {
namespace {

std::string in_torchs_words(const Slot& slot) {
  return slot.paired ? to_string(slot) + "OVERLAP_F_B" : to_string(slot);
}

std::vector<std::vector<std::string>> texts_of(const Schedule& schedule) {
  std::vector<std::vector<std::string>> lists;
  for (const auto& slots : schedule.slots) {
    auto& list = lists.emplace_back();
    for (const Slot& slot : slots) list.push_back(in_torchs_words(slot));
  }
  return lists;
}

std::string message_of(Kind kind, const Shape& shape) {
  return refusal_of(ErrorKind::kConfig, [&] { make_schedule(kind, shape); });
}

// Every order of the recorded file comes out word for word.
TEST(Kinds, GiveTheRecordedOrders) {
  const auto cases = testing::recorded_schedules();
  ASSERT_EQ(cases.size(), 25U);
  for (const testing::Recorded& recorded : cases) {
    EXPECT_EQ(texts_of(make_schedule(kind_named(recorded.schedule), recorded.shape)),
              recorded.order)
        << recorded.name();
  }
}

// The three kinds of one stage a rank, as their papers draw them.
TEST(Kinds, OfOneStageARankAreThoseOfTheirPapers) {
  EXPECT_EQ(to_string(make_schedule(Kind::kGPipe, {2, 1, 2})),
            "rank 0: 0F0 0F1 0B0 0B1\n"
            "rank 1: 1F0 1F1 1B0 1B1\n");
  EXPECT_EQ(to_string(make_schedule(Kind::kOneFOneB, {3, 1, 4})),
            "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
            "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
            "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n");
  EXPECT_EQ(to_string(make_schedule(Kind::kZeroBubble, {2, 1, 4})),
            "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3\n"
            "rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3\n");
}

// Two forwards more ahead a hop, then pairs, then what is left.
TEST(Kinds, Paired1F1BHasEachForwardWithAnEarlierBackward) {
  EXPECT_EQ(to_string(make_schedule(Kind::kPairedOneFOneB, {1, 1, 3})),
            "rank 0: 0F0 (0F1;0B0) (0F2;0B1) 0B2\n");
  EXPECT_EQ(to_string(make_schedule(Kind::kPairedOneFOneB, {2, 1, 5})),
            "rank 0: 0F0 0F1 0F2 (0F3;0B0) (0F4;0B1) 0B2 0B3 0B4\n"
            "rank 1: 1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) (1F4;1B3) 1B4\n");
  EXPECT_EQ(to_string(make_schedule(Kind::kPairedOneFOneB, {3, 1, 2})),
            "rank 0: 0F0 0F1 0B0 0B1\n"
            "rank 1: 1F0 1F1 1B0 1B1\n"
            "rank 2: 2F0 (2F1;2B0) 2B1\n");
}

// F, I or B, and W or B of a stage come in the order of the micro-batches, in every kind.
TEST(Kinds, KeepMicroBatchesInOrder) {
  int schedules = 0;
  for (const KindRow& row : kinds()) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      const int stages_per_rank = row.any_stages ? 3 : row.stages_per_rank;
      for (int micro_batches = 2 * ranks; micro_batches <= 6 * ranks; micro_batches += ranks) {
        const Schedule schedule = make_schedule(row.kind, {ranks, stages_per_rank, micro_batches});
        std::map<std::tuple<int, char>, int> next;  // of (stage, what)
        for (const auto& slots : schedule.slots) {
          for (const Slot& slot : slots) {
            slot.each([&](const Action& action) {
              const auto in_order = [&](char what) {
                EXPECT_EQ(action.micro_batch, (next[{action.stage, what}]++))
                    << row.name << ' ' << ranks << ' ' << to_string(action);
              };
              if (action.kind == ActionKind::kForward) in_order('F');
              if (action.gives_input_gradient()) in_order('I');
              if (action.kind == ActionKind::kWeightGradient ||
                  action.kind == ActionKind::kBackward) {
                in_order('W');
              }
            });
          }
        }
        for (const auto& [what, count] : next) EXPECT_EQ(count, micro_batches) << row.name;
        EXPECT_EQ(next.size(), 3U * static_cast<std::size_t>(schedule.stages())) << row.name;
        ++schedules;
      }
    }
  }
  EXPECT_EQ(schedules, 8 * 5 * 5);
}

TEST(Kinds, AreFoundByOurNamesAndByTorchs) {
  for (const KindRow& row : kinds()) EXPECT_EQ(kind_named(row.name), row.kind);
  EXPECT_EQ(kind_named("zbvzerobubble"), Kind::kZeroBubbleV);
  EXPECT_EQ(kind_named("ScheduleInterleavedZeroBubble"), Kind::kInterleavedZeroBubble);
  EXPECT_EQ(kind_named("Schedule1F1B"), Kind::kOneFOneB);
  EXPECT_THROW(kind_named("LoopedBFS"), Error);
  EXPECT_THROW(kind_named(""), Error);
}

TEST(Kinds, RefuseWithNumbers) {
  EXPECT_THAT(message_of(Kind::kOneFOneB, {4, 1, 3}),
              Says("1F1B on 4 ranks: found 3 micro-batches, expected at least 4"));
  EXPECT_THAT(message_of(Kind::kDualPipeV, {4, 2, 7}),
              Says("DualPipeV on 4 ranks: found 7 micro-batches, expected at least 8"));
  EXPECT_THAT(message_of(Kind::kInterleavedOneFOneB, {4, 2, 11}),
              Says("found 11 micro-batches, expected a multiple of 2"));
  EXPECT_THAT(message_of(Kind::kZeroBubbleV, {4, 3, 8}),
              Says("ZBV: found 3 stages a rank, expected 2"));
  EXPECT_THAT(message_of(Kind::kGPipe, {4, 2, 8}),
              Says("GPipe: found 2 stages a rank, expected 1"));
  EXPECT_THAT(message_of(Kind::kGPipe, {0, 1, 8}), Says("found 0 ranks"));
  EXPECT_THAT(message_of(Kind::kGPipe, {2, 1, 0}), Says("found 0 micro-batches"));
  EXPECT_THAT(message_of(Kind::kInterleavedOneFOneB, {1 << 20, 1 << 20, 8}),
              Says("expected at most 4096 stages"));
  EXPECT_THAT(message_of(Kind::kGPipe, {4096, 1, 65536}), Says("expected a product of"));
}

// With fewer micro-batches than ranks the kinds that take it still do each action once.
TEST(Kinds, TakeFewMicroBatchesWhereTheyHaveAMeaning) {
  for (const Kind kind :
       {Kind::kGPipe, Kind::kZeroBubble, Kind::kZeroBubbleV, Kind::kPairedOneFOneB}) {
    const Schedule schedule = make_schedule(kind, {5, row_of(kind).stages_per_rank, 1});
    const bool in_halves = kind == Kind::kZeroBubble || kind == Kind::kZeroBubbleV;
    const std::size_t each = in_halves ? 3 * schedule.stages_of(0).size() : 2;
    for (const auto& slots : schedule.slots) EXPECT_EQ(slots.size(), each) << row_of(kind).name;
  }
}

TEST(Actions, ReadBackAsTheyAreWritten) {
  for (const ActionKind kind : {ActionKind::kForward, ActionKind::kInputGradient,
                                ActionKind::kWeightGradient, ActionKind::kBackward}) {
    const Action action{kind, 12, 345};
    EXPECT_EQ(parse_action(to_string(action)), action);
  }
  for (const char* text : {"", "0", "F", "0F", "F0", "0F0x", "-1F0", "0F-1", "0X0", " 0F0", "0f0",
                           "4096F0", "0F65536", "99999999999F0", "+1F0", "0F+1"}) {
    EXPECT_EQ(parse_action(text), std::nullopt) << text;
  }
}

// The turn of a V is within a rank, every other border of stages is between ranks.
TEST(HandOvers, TravelBetweenRanksOnly) {
  const Schedule v = make_schedule(Kind::kZeroBubbleV, {3, 2, 6});
  EXPECT_TRUE(is_message({Direction::kForward, 1, 0}, v));
  EXPECT_FALSE(is_message({Direction::kForward, 2, 0}, v));
  EXPECT_FALSE(is_message({Direction::kBackward, 3, 0}, v));
  EXPECT_EQ(given_by({ActionKind::kForward, 5, 0}, 6), std::nullopt);
  EXPECT_EQ(given_by({ActionKind::kBackward, 0, 0}, 6), std::nullopt);
  EXPECT_EQ(given_by({ActionKind::kWeightGradient, 3, 0}, 6), std::nullopt);
  EXPECT_EQ(given_by({ActionKind::kInputGradient, 3, 1}, 6),
            (HandOver{Direction::kBackward, 3, 1}));
  EXPECT_EQ(needed_by({ActionKind::kBackward, 2, 1}, 6), (HandOver{Direction::kBackward, 3, 1}));
  EXPECT_EQ(needed_by({ActionKind::kForward, 0, 1}, 6), std::nullopt);
}

// Files of schedules read back as they were written; those that are none are refused by row and
// cell.

std::string message_of(std::string_view text) {
  return refusal_of(ErrorKind::kFormat, [&] { parse_csv(text, "a.csv"); });
}

TEST(ScheduleCsv, IsARowARank) {
  const Schedule schedule = make_schedule(Kind::kDualPipeV, {1, 2, 2});
  EXPECT_EQ(to_csv(schedule), "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\r\n");
  EXPECT_EQ(to_csv(lower(make_schedule(Kind::kGPipe, {2, 1, 1}))),
            "0UNSHARD,0RECV_B0,0F0,0SEND_F0,0B0,0RESHARD,0REDUCE_GRAD\r\n"
            "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD,1REDUCE_GRAD\r\n")
      << "receives a slot ahead";
}

// Both forms of every kind and of random schedules read back as the same values.
TEST(ScheduleCsv, ReadsBackAsItIsWritten) {
  std::vector<Schedule> schedules;
  for (const KindRow& row : kinds()) {
    schedules.push_back(make_schedule(row.kind, {3, row.stages_per_rank, 9}));
  }
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    testing::Dice dice(seed);
    schedules.push_back(testing::random_schedule(dice, testing::MicroBatchOrder::kAny));
  }
  for (const Schedule& schedule : schedules) {
    const Program slots = parse_csv(to_csv(schedule), "x");
    EXPECT_EQ(schedule_of(slots), schedule) << to_string(schedule);
    EXPECT_FALSE(has_messages(slots));
    const Program program = lower(schedule);
    EXPECT_EQ(parse_csv(to_csv(program), "x"), program) << to_string(schedule);
  }
}

// A rank sends and receives the messages that PyTorch's lowering gives it, wherever they stand.
TEST(ScheduleCsv, LowersToTheRecordedMessages) {
  int compared = 0;
  for (const testing::Recorded& recorded : testing::recorded_schedules()) {
    const Program program = lower(make_schedule(kind_named(recorded.schedule), recorded.shape));
    for (std::size_t rank = 0; rank < recorded.lowered.size(); ++rank) {
      std::vector<std::string> ours;
      for (const Step& step : program.steps[rank]) ours.push_back(to_string(step));
      std::vector<std::string> theirs = recorded.lowered[rank];
      std::ranges::sort(ours);
      std::ranges::sort(theirs);
      EXPECT_EQ(ours, theirs) << recorded.name() << " rank " << rank;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 3 * 2 + 2 * 3 + 3 * 4);
}

// Programs that PyTorch lowered validate as they stand.
TEST(ScheduleCsv, RecordedProgramsAreValid) {
  int programs = 0;
  for (const testing::Recorded& recorded : testing::recorded_schedules()) {
    std::string text;
    for (const auto& steps : recorded.lowered) {
      for (const std::string& step : steps) text += step + ",";
      text += "\n";
    }
    if (text.empty()) continue;
    const Program program = parse_csv(text, recorded.name());
    EXPECT_TRUE(has_messages(program));
    const Validation validation = validate(program);
    EXPECT_TRUE(validation.valid()) << validation.findings[0].text;
    ++programs;
  }
  EXPECT_EQ(programs, 8);
}

TEST(ScheduleCsv, TakesWhatOtherProgramsMakeOfIt) {
  const Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 2});
  for (const char* text :
       {"0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", "0F0,,0F1,,0B0,0B1,\n1F0,1F1,1B0,1B1\n\n\r\n",
        " 0F0 ,\"0F1\",0B0,\t0B1\r\n\"1F0\",1F1,1B0,1B1\r\n"}) {
    EXPECT_EQ(schedule_of(parse_csv(text, "x")), schedule) << text;
  }
}

// PyTorch 2.15 has a wait for every send and reduction, anywhere behind it.
TEST(ScheduleCsv, LeavesOutWaitsForSendsAndReductions) {
  int waits = 0;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    testing::Dice dice(seed);
    const Program program =
        lower(testing::random_schedule(dice, testing::MicroBatchOrder::kAny), dice.roll(4));
    std::string text;
    for (const auto& steps : program.steps) {
      std::vector<std::string> open;
      for (const Step& step : steps) {
        std::string word = to_string(step);
        text += word + ",";
        for (const char* waited_for : {"SEND_", "REDUCE_"}) {
          if (const auto at = word.find(waited_for); at != std::string::npos) {
            open.push_back(word.insert(at, "WAIT_"));
            ++waits;
          }
        }
        if (!open.empty() && dice.chance(50)) {
          text += open.back() + ",";
          open.pop_back();
        }
      }
      for (const std::string& word : open) text += word + ",";
      text += "\n";
    }
    EXPECT_EQ(parse_csv(text, "x"), program) << text;
  }
  EXPECT_GT(waits, 1000);
  for (const char* text :
       {"1WAIT_RECV_F0", "0WAIT_UNSHARD", "0WAIT_F0", "WAIT_SEND_F0", "0WAIT_SEND_F",
        "0WAIT_WAIT_SEND_F0", "0WAIT_", "WAIT_0SEND_F0", "0SEND_WAIT_F0"}) {
    EXPECT_THAT(message_of(text), Says("row 1, cell 1")) << text;
  }
}

TEST(ScheduleCsv, RefusesByRowAndCell) {
  EXPECT_THAT(message_of("0F0,0B0\n1F0,1X0"),
              Says("a.csv, row 2, cell 2: found '1X0', expected a step of a schedule"));
  for (const char* text : {"0F0,(0F1;0B0)", "(0F0)OVERLAP_F_B", "(0F0;0B1;0B2)OVERLAP_F_B",
                           "0F1OVERLAP_F_B", "0SEND_F", "0RECV_F0", "0SEND_B0", "UNSHARD",
                           "0UNSHARD1", "4096F0", "0F65536", "0F0;0B0", "rank 0"}) {
    EXPECT_THAT(message_of(text), Says("row 1, cell")) << text;
  }
  EXPECT_THAT(message_of(""), Says("found no action"));
  EXPECT_THAT(message_of("\n\n"), Says("found no action"));
  EXPECT_THAT(message_of("0UNSHARD"), Says("found no action"));
  EXPECT_THAT(message_of("4095F65535"), Says("expected a product of at most"));
  EXPECT_THAT(message_of(std::string(5000, '\n') + "0F0"), Says("more than 4096 rows"));
}

TEST(ScheduleCsv, RefusesMoreStepsThanAScheduleHas) {
  constexpr int kMostSteps = 8 * static_cast<int>(kMostCells);
  std::string text;
  for (int i = 0; i <= kMostSteps; ++i) text += "0F0,";
  EXPECT_THAT(message_of(text), Says(concat("a.csv, row 1, cell ", kMostSteps + 1,
                                            ": found more than ", kMostSteps, " steps")));
}

// A schedule that cannot run is read, and validation names the fault.
TEST(ScheduleCsv, LeavesWhatCannotRunToTheValidator) {
  const Program gap = parse_csv("0F0,0B0\n2F0,2B0\n", "x");
  EXPECT_EQ(gap.rank_of, (std::vector<int>{0, -1, 1}));
  EXPECT_FALSE(validate(schedule_of(gap)).valid());
  EXPECT_FALSE(validate(gap).valid());
  const Program empty_rank = parse_csv("0F0,0B0\n\n1F0,1B0\n", "x");
  EXPECT_EQ(empty_rank.steps.size(), 3U);
  const Validation validation = validate(schedule_of(empty_rank));
  ASSERT_EQ(validation.findings.size(), 1U);
  EXPECT_EQ(validation.findings[0].text, "rank 1: found no action, expected those of a stage");
  const Program elsewhere = parse_csv("0F0,0B0,1RECV_B0,7SEND_F9\n1F0,1B0\n", "x");
  EXPECT_FALSE(validate(elsewhere).valid());
}

// Layers on stages: none lost, none empty, and none better.

void expect_whole(const Split& split, int layers, int stages) {
  ASSERT_EQ(split.stages(), stages);
  int next = 0;
  for (int stage = 0; stage < stages; ++stage) {
    EXPECT_EQ(split.begin(stage), next) << "no layer is lost or doubled";
    const bool has_more = stage == 0 || stage + 1 == stages;
    EXPECT_GE(split.end(stage) - split.begin(stage), has_more ? 0 : 1);
    next = split.end(stage);
  }
  EXPECT_EQ(next, layers);
}

double largest_of_ranks(const Split& split, const LayerCosts& costs,
                        const std::vector<int>& rank_of) {
  std::vector<double> ranks(rank_of.size());
  const std::vector<double> stages = stage_costs(split, costs);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    ranks[static_cast<std::size_t>(rank_of[i])] += stages[i];
  }
  return std::ranges::max(ranks);
}

/// By trying all splits.
double smallest_of_ranks(const LayerCosts& costs, const std::vector<int>& rank_of) {
  const int layers = static_cast<int>(costs.layers.size());
  const int stages = static_cast<int>(rank_of.size());
  std::optional<double> smallest;
  Split split{layers, {}};
  const std::function<void(int)> place = [&](int from) {
    const int stage = split.stages();
    if (stage == stages) {
      for (int s = 0; s < stages; ++s) {
        if (split.end(s) - split.begin(s) < (s == 0 || s + 1 == stages ? 0 : 1)) return;
      }
      const double largest = largest_of_ranks(split, costs, rank_of);
      smallest = std::min(smallest.value_or(largest), largest);
      return;
    }
    for (int first = from; first <= (stage == 0 ? 0 : layers); ++first) {
      split.first_layer.push_back(first);
      place(first);
      split.first_layer.pop_back();
    }
  };
  place(0);
  return *smallest;
}

struct Case {
  LayerCosts costs;
  std::vector<int> rank_of;
};

Case draw(testing::Dice& dice, bool equal_layers) {
  const int ranks = 1 + dice.roll(3);
  const bool is_v = dice.chance(40);
  const int stages_per_rank = is_v ? 2 : 1 + dice.roll(2);
  Case one;
  one.rank_of = place_stages(is_v ? Placement::kV : Placement::kLoop, ranks, stages_per_rank);
  const int stages = ranks * stages_per_rank;
  const int layers = std::max(1, stages - 2) + dice.roll(8);
  for (int i = 0; i < layers; ++i) {
    one.costs.layers.push_back(equal_layers ? 4.0 : 1.0 + dice.roll(9));
  }
  one.costs.before = dice.roll(2) * dice.roll(8);
  one.costs.after = dice.roll(20);
  return one;
}

// Where all layers cost the same, or a rank has one stage, no split has a cheaper costliest rank.
TEST(Split, IsTheBestOfAllSplits) {
  int looked_at = 0;
  for (std::uint64_t seed = 1; seed <= 600; ++seed) {
    testing::Dice dice(seed);
    const bool equal_layers = dice.chance(60);
    const Case one = draw(dice, equal_layers);
    const Split split = split_by_cost(one.costs, one.rank_of);
    expect_whole(split, static_cast<int>(one.costs.layers.size()),
                 static_cast<int>(one.rank_of.size()));
    const bool one_stage_a_rank =
        static_cast<int>(one.rank_of.size()) == std::ranges::max(one.rank_of) + 1;
    if (!equal_layers && !one_stage_a_rank) continue;
    EXPECT_EQ(largest_of_ranks(split, one.costs, one.rank_of),
              smallest_of_ranks(one.costs, one.rank_of))
        << "seed " << seed << ": " << to_string(split);
    ++looked_at;
  }
  EXPECT_GT(looked_at, 300);
}

// Elsewhere it is never worse than the even split, and moving one layer does not help.
TEST(Split, OfUnequalLayersIsCloseToTheBest) {
  double worst = 1.0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    testing::Dice dice(seed);
    const Case one = draw(dice, false);
    const double found =
        largest_of_ranks(split_by_cost(one.costs, one.rank_of), one.costs, one.rank_of);
    worst = std::max(worst, found / smallest_of_ranks(one.costs, one.rank_of));
  }
  EXPECT_LE(worst, 1.25) << "of the best of all splits";
}

// The head of a large vocabulary weighs as much as many layers.
TEST(Split, CountsEmbeddingAndHead) {
  const LayerCosts costs{std::vector<double>(8, 1.0), 0.0, 4.0};
  EXPECT_EQ(to_string(split_by_cost(costs, {0, 1})),
            "stage 0: embedding, layers 0-5; stage 1: layers 6-7, head");
  EXPECT_EQ(stage_costs(split_by_cost(costs, {0, 1}), costs), (std::vector<double>{6.0, 6.0}));
  // On a V rank 0 has both ends.
  const Split v = split_by_cost(costs, {0, 1, 1, 0});
  EXPECT_EQ(v.end(2) - v.begin(1), 6) << to_string(v);
  const LayerCosts heavy{std::vector<double>(4, 1.0), 0.0, 9.0};
  EXPECT_EQ(to_string(split_by_cost(heavy, {0, 1})),
            "stage 0: embedding, layers 0-3; stage 1: head");
}

TEST(Split, OfEqualLayersIsEven) {
  const LayerCosts costs{std::vector<double>(8, 1.0), 0.0, 0.0};
  EXPECT_EQ(split_by_cost(costs, {0, 1, 2, 3}).first_layer, (std::vector<int>{0, 2, 4, 6}));
  EXPECT_EQ(split_by_cost(costs, {0}).first_layer, (std::vector<int>{0}));
  EXPECT_EQ(
      split_by_cost({std::vector<double>(32, 1.0), 0, 0}, {0, 1, 2, 3, 3, 2, 1, 0}).first_layer,
      (std::vector<int>{0, 4, 8, 12, 16, 20, 24, 28}));
}

// Two layers on four stages: embedding and head stand alone; one is too few.
TEST(Split, RefusesTooFewLayersWithNumbers) {
  const LayerCosts two{{1.0, 1.0}, 0.0, 1.0};
  EXPECT_EQ(to_string(split_by_cost(two, {0, 1, 1, 0})),
            "stage 0: embedding; stage 1: layer 0; stage 2: layer 1; stage 3: head");
  const LayerCosts one{{1.0}, 0.0, 1.0};
  EXPECT_REFUSED(kConfig, split_by_cost(one, {0, 1, 1, 0}),
                 "pipeline.split: found 1 layers for 4 stages, expected at least 2");
}

TEST(Split, AsGivenIsTakenOrRefused) {
  EXPECT_EQ(split_as_given({0, 1, 6}, 8, 3).first_layer, (std::vector<int>{0, 1, 6}));
  expect_whole(split_as_given({0, 0, 8}, 8, 3), 8, 3);
  for (const auto& [first, layers] : std::vector<std::pair<std::vector<int>, int>>{{{0, 4}, 8},
                                                                                   {{1, 4, 6}, 8},
                                                                                   {{0, 6, 4}, 8},
                                                                                   {{0, 4, 4}, 8},
                                                                                   {{0, 4, 9}, 8},
                                                                                   {{0, -1, 4}, 8},
                                                                                   {{}, 8}}) {
    EXPECT_THROW(split_as_given(first, layers, 3), Error);
  }
}

}  // namespace
}  // namespace tessera::pipeline::kinds_test
