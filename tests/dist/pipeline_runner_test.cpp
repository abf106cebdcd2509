// The runner beside the same stages in one process, one micro-batch after the other: every kind of
// schedule, any valid one, messages that take their time; and what is refused.
#include "pipeline/runner.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "dist/mail_stand_in.h"
#include "dist/pipeline_stages.h"
#include "pipeline/kinds.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/validate.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::test::pipeline_runner_test {
namespace {

using namespace tessera::pipeline;  // NOLINT(google-build-using-namespace): what is tested
using ::testing::HasSubstr;

/// How messages travel.
struct Way {
  bool buffered = false;
  std::uint64_t delays = 0;  ///< seed; 0 = none
};

/// What stands between the ranks of one case.
class Lines {
 public:
  explicit Lines(const Way& way) : box_(std::make_shared<Box>()) {
    box_->buffered = way.buffered;
    if (way.delays != 0) {
      box_->delay = [seed = way.delays](const comm::MailTag& tag) {
        testing::Dice dice(seed + static_cast<std::uint64_t>(
                                      tag.stage * 131 + tag.micro_batch * 17 + tag.index) +
                           (tag.direction == comm::MailTag::Direction::kForward ? 0 : 7));
        return std::chrono::microseconds(dice.chance(50) ? 0 : dice.roll(300));
      };
    }
  }
  Ties of(World& world) const {
    Ties ties{world.shared_from_this(), {}, {}, at::kCPU};
    if (world.size() == 1) return ties;
    auto mail = std::make_shared<StandInMail>();
    mail->box = box_;
    mail->r = world.rank();
    mail->n = world.size();
    mail->world = &world;
    ties.mail = mail;
    std::vector<int> all(static_cast<std::size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    ties.group = world.group(all, "pipeline control");
    return ties;
  }

 private:
  std::shared_ptr<Box> box_;
};

/// The stages of one rank.
struct Mine {
  Mine(const Toy& toy, const Schedule& schedule, int rank) : ids(schedule.stages_of(rank)) {
    for (const int id : ids) stages.push_back(std::make_unique<ToyStage>(toy, id));
  }
  std::vector<Stage*> pointers() const {
    std::vector<Stage*> result;
    for (const auto& stage : stages) result.push_back(stage.get());
    return result;
  }
  std::vector<int> ids;
  std::vector<std::unique_ptr<ToyStage>> stages;
};

Left run(const ValidProgram& program, const Toy& toy, const Way& way = {}) {
  const Lines lines(way);
  Left left;
  std::mutex mutex;
  ranks(program.schedule().ranks()).run([&](World& world) {
    Runner runner(lines.of(world));
    const Mine mine(toy, program.schedule(), world.rank());
    const auto results = runner.run(program, mine.pointers(), nullptr);
    const std::lock_guard lock(mutex);
    for (const auto& result : results) left.losses.push_back(result.at(0));
    for (std::size_t i = 0; i < mine.ids.size(); ++i) {
      add_gradients(left, mine.ids[i], *mine.stages[i]);
    }
  });
  return left;
}

/// Whole numbers have a zero of either sign.
::testing::AssertionResult same(const at::Tensor& a, const at::Tensor& b, Numbers numbers) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one of them is none";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (numbers == Numbers::kReal) return same_bits(a, b);
  if (a.equal(b)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << " against " << b;
}

void expect_same(const Left& left, const Left& expected, Numbers numbers) {
  ASSERT_EQ(left.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < left.losses.size(); ++i) {
    EXPECT_TRUE(same(left.losses[i], expected.losses[i], numbers)) << "loss of micro-batch " << i;
  }
  ASSERT_EQ(left.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : left.gradients) {
    EXPECT_TRUE(same(gradient, expected.gradients.at(name), numbers)) << name;
  }
}

TEST(PipelineRunner, EveryKindGivesTheBitsOfOneProcess) {
  for (const KindRow& row : kinds()) {
    for (const int ranks : {1, 2, 4}) {
      for (const int more : {0, 3}) {
        Toy toy;
        toy.stages = ranks * row.stages_per_rank;
        const Shape shape{ranks, row.stages_per_rank, toy.stages + more * ranks};
        toy.seed = static_cast<std::uint64_t>(ranks + more);
        SCOPED_TRACE(concat(row.name, ", ", ranks, " ranks, ", shape.micro_batches));
        const ValidProgram program(make_schedule(row.kind, shape));
        expect_same(run(program, toy), run_in_one_process(toy, shape.micro_batches), toy.numbers);
      }
    }
  }
}

TEST(PipelineRunner, RandomSchedulesEndWithTheSameBits) {
  testing::Dice dice(18);
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(concat("schedule ", i));
    const auto schedule = testing::random_schedule(dice);
    Toy toy;
    toy.stages = schedule.stages();
    toy.seed = static_cast<std::uint64_t>(i);
    toy.frozen = dice.chance(25) ? dice.roll(toy.stages + 1) : 0;
    const Way way{dice.chance(50), dice.chance(75) ? static_cast<std::uint64_t>(i + 1) : 0};
    expect_same(run(ValidProgram(schedule), toy, way),
                run_in_one_process(toy, schedule.micro_batches), toy.numbers);
    if (HasFailure()) return;
  }
}

TEST(PipelineRunner, SchedulesInAnyOrderEndWithTheSameSums) {
  testing::Dice dice(19);
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE(concat("schedule ", i));
    const auto schedule = testing::random_schedule(dice, testing::MicroBatchOrder::kAny);
    Toy toy;
    toy.stages = schedule.stages();
    toy.seed = static_cast<std::uint64_t>(i);
    toy.numbers = Numbers::kWhole;
    const Way way{dice.chance(50), static_cast<std::uint64_t>(i + 1)};
    expect_same(run(ValidProgram(schedule), toy, way),
                run_in_one_process(toy, schedule.micro_batches), toy.numbers);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::test::pipeline_runner_test
