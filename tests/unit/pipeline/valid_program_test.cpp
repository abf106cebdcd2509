// Programs that can run: which are refused, and where stages move in spite of a file.
#include "pipeline/valid_program.h"

#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "support/test.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::test::valid_program_test {
namespace {

using namespace tessera::pipeline;  // NOLINT(google-build-using-namespace): what is tested
using testing::Dice;
using testing::random_schedule;

std::vector<Step> without_moves(const std::vector<Step>& steps) {
  std::vector<Step> rest;
  std::ranges::copy_if(steps, std::back_inserter(rest),
                       [](const Step& step) { return !std::holds_alternative<Residency>(step); });
  return rest;
}

/// Which actions of the stage stand before and behind the step at `index`.
bool any_of_stage(const std::vector<Step>& steps, std::size_t begin, std::size_t end, int stage,
                  const std::string& letters) {
  for (std::size_t i = begin; i < end; ++i) {
    const auto* slot = std::get_if<Slot>(&steps[i]);
    bool found = false;
    if (slot != nullptr) {
      slot->each([&](const Action& action) {
        found = found ||
                (action.stage == stage && letters.find(op_of(action.kind)) != std::string::npos);
      });
    }
    if (found) return true;
  }
  return false;
}

TEST(ValidProgram, MovesOfParametersFollowFromTheSlotsAlone) {
  Dice dice(5);
  for (int i = 0; i < 300; ++i) {
    const auto schedule = random_schedule(dice, testing::MicroBatchOrder::kAny);
    Program file = lower(schedule, 1 + dice.roll(3));
    if (!has_messages(file)) continue;
    for (auto& steps : file.steps) {
      // As a file may have them: anywhere, or none.
      const auto count = steps.size();
      for (std::size_t k = 0; k < count; ++k) {
        auto& step = steps[static_cast<std::size_t>(dice.roll(static_cast<int>(count)))];
        if (std::holds_alternative<Residency>(step)) std::swap(step, steps[k]);
      }
      std::vector<Step> kept;
      for (const auto& step : steps) {
        if (!std::holds_alternative<Residency>(step) || dice.chance(50)) kept.push_back(step);
      }
      steps = kept;
    }
    if (!validate(file).valid()) continue;  // a swap has moved a message
    const ValidProgram program(file);
    EXPECT_EQ(program.schedule(), schedule_of(file));
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      const auto& steps = program.program().steps[static_cast<std::size_t>(rank)];
      EXPECT_EQ(without_moves(steps), without_moves(file.steps[static_cast<std::size_t>(rank)]));
      std::map<std::pair<int, Residency::Move>, int> moves;
      for (std::size_t k = 0; k < steps.size(); ++k) {
        const auto* move = std::get_if<Residency>(&steps[k]);
        if (move == nullptr) continue;
        ++moves[{move->stage, move->move}];
        const auto before = [&](const char* letters) {
          return any_of_stage(steps, 0, k, move->stage, letters);
        };
        const auto behind = [&](const char* letters) {
          return any_of_stage(steps, k, steps.size(), move->stage, letters);
        };
        switch (move->move) {
          case Residency::Move::kUnshard:
            EXPECT_FALSE(before("FIBW"));
            EXPECT_TRUE(behind("F"));
            break;
          case Residency::Move::kReshard:
            EXPECT_TRUE(before("IB"));
            EXPECT_FALSE(behind("FIB"));
            break;
          case Residency::Move::kReduce:
            EXPECT_TRUE(before("WB"));
            EXPECT_FALSE(behind("FIBW"));
            break;
        }
      }
      EXPECT_EQ(moves.size(), 3 * schedule.stages_of(rank).size());
      for (const auto& [move, count] : moves) EXPECT_EQ(count, 1);
    }
    if (HasFailure()) return;
  }
}

TEST(ValidProgram, TheHashIsOfAllThatIsRun) {
  const auto schedule = make_schedule(Kind::kZeroBubble, {2, 1, 4});
  const ValidProgram program(schedule);
  EXPECT_EQ(program.hash(), ValidProgram(parse_csv(to_csv(schedule), "test")).hash());
  EXPECT_NE(program.hash(), ValidProgram(lower(schedule, 2)).hash());
  EXPECT_NE(program.hash(), ValidProgram(make_schedule(Kind::kZeroBubble, {2, 1, 6})).hash());
  EXPECT_NE(program.hash(), ValidProgram(forward_only(schedule), Passes::kForward).hash());
}

TEST(ValidProgram, MessagesThatOvertakeAreRefusedWhereTheyHaveNoTags) {
  Schedule schedule = make_schedule(Kind::kGPipe, {2, 1, 3});
  ValidProgram(schedule).require_messages_in_order();
  std::swap(schedule.slots[1][0], schedule.slots[1][1]);
  const ValidProgram overtakes(schedule);
  EXPECT_REFUSED(kConfig, overtakes.require_messages_in_order(),
                 "rank 1: found the receive of activations of "
                 "stage 0, micro-batch 1",
                 "over NCCL messages have no tags");
  // Those of forwards alone, too.
  const ValidProgram forwards(forward_only(schedule), Passes::kForward);
  EXPECT_THROW(forwards.require_messages_in_order(), Error);
}

TEST(ValidProgram, FindingsAreAnErrorThatNamesThem) {
  auto schedule = make_schedule(Kind::kGPipe, {2, 1, 3});
  std::swap(schedule.slots[1].front(), schedule.slots[1].back());
  EXPECT_REFUSED(kConfig, const ValidProgram program(schedule), "dependency: rank 1");
}

}  // namespace
}  // namespace tessera::test::valid_program_test
