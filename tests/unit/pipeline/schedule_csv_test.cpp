// Files of schedules read back as they were written; those that are none are refused by row and
// cell.
#include "pipeline/schedule_csv.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "pipeline/kinds.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "unit/pipeline/random_schedule.h"
#include "unit/pipeline/recorded.h"

namespace tessera::pipeline::schedule_csv_test {
namespace {

using ::testing::HasSubstr;

std::string message_of(std::string_view text) {
  try {
    parse_csv(text, "a.csv");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    return error.what();
  }
  return "no error";
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

TEST(ScheduleCsv, RefusesByRowAndCell) {
  EXPECT_THAT(message_of("0F0,0B0\n1F0,1X0"),
              HasSubstr("a.csv, row 2, cell 2: found '1X0', expected a step of a schedule"));
  for (const char* text : {"0F0,(0F1;0B0)", "(0F0)OVERLAP_F_B", "(0F0;0B1;0B2)OVERLAP_F_B",
                           "0F1OVERLAP_F_B", "0SEND_F", "0RECV_F0", "0SEND_B0", "UNSHARD",
                           "0UNSHARD1", "4096F0", "0F65536", "0F0;0B0", "rank 0"}) {
    EXPECT_THAT(message_of(text), HasSubstr("row 1, cell")) << text;
  }
  EXPECT_THAT(message_of(""), HasSubstr("found no action"));
  EXPECT_THAT(message_of("\n\n"), HasSubstr("found no action"));
  EXPECT_THAT(message_of("0UNSHARD"), HasSubstr("found no action"));
  EXPECT_THAT(message_of("4095F65535"), HasSubstr("expected a product of at most"));
  EXPECT_THAT(message_of(std::string(5000, '\n') + "0F0"), HasSubstr("more than 4096 rows"));
}

TEST(ScheduleCsv, RefusesMoreStepsThanAScheduleHas) {
  constexpr int kMostSteps = 8 * static_cast<int>(kMostCells);
  std::string text;
  for (int i = 0; i <= kMostSteps; ++i) text += "0F0,";
  EXPECT_THAT(message_of(text), HasSubstr(concat("a.csv, row 1, cell ", kMostSteps + 1,
                                                 ": found more than ", kMostSteps, " steps")));
}

// What cannot run is read, and validation names it.
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

}  // namespace
}  // namespace tessera::pipeline::schedule_csv_test
