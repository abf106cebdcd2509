// Every kind gives the lists that were recorded or that its paper draws, and refuses with numbers
// what it cannot be.
#include "pipeline/kinds.h"

#include <gmock/gmock.h>

#include <map>
#include <tuple>

#include "tessera/error.h"
#include "unit/pipeline/recorded.h"

namespace tessera::pipeline::kinds_test {
namespace {

using ::testing::HasSubstr;

std::string in_torchs_words(const Slot& slot) {
  return slot.beside ? to_string(slot) + "OVERLAP_F_B" : to_string(slot);
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
  try {
    make_schedule(kind, shape);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  return "no error";
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
  EXPECT_EQ(schedules, 7 * 5 * 5);
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
              HasSubstr("1F1B on 4 ranks: found 3 micro-batches, expected at least 4"));
  EXPECT_THAT(message_of(Kind::kDualPipeV, {4, 2, 7}),
              HasSubstr("DualPipeV on 4 ranks: found 7 micro-batches, expected at least 8"));
  EXPECT_THAT(message_of(Kind::kInterleavedOneFOneB, {4, 2, 11}),
              HasSubstr("found 11 micro-batches, expected a multiple of 2"));
  EXPECT_THAT(message_of(Kind::kZeroBubbleV, {4, 3, 8}),
              HasSubstr("ZBV: found 3 stages a rank, expected 2"));
  EXPECT_THAT(message_of(Kind::kGPipe, {4, 2, 8}),
              HasSubstr("GPipe: found 2 stages a rank, expected 1"));
  EXPECT_THAT(message_of(Kind::kGPipe, {0, 1, 8}), HasSubstr("found 0 ranks"));
  EXPECT_THAT(message_of(Kind::kGPipe, {2, 1, 0}), HasSubstr("found 0 micro-batches"));
  EXPECT_THAT(message_of(Kind::kInterleavedOneFOneB, {1 << 20, 1 << 20, 8}),
              HasSubstr("expected at most 4096 stages"));
  EXPECT_THAT(message_of(Kind::kGPipe, {4096, 1, 65536}), HasSubstr("expected a product of"));
}

// With fewer micro-batches than ranks the kinds that take it still do each action once.
TEST(Kinds, TakeFewMicroBatchesWhereTheyHaveAMeaning) {
  for (const Kind kind : {Kind::kGPipe, Kind::kZeroBubble, Kind::kZeroBubbleV}) {
    const Schedule schedule = make_schedule(kind, {5, row_of(kind).stages_per_rank, 1});
    const std::size_t each = kind == Kind::kGPipe ? 2 : 3 * schedule.stages_of(0).size();
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

}  // namespace
}  // namespace tessera::pipeline::kinds_test
