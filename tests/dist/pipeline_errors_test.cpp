// Refusals and failures of a pipeline: every rank ends, with the place by name, and is ready for
// the next step after recover().

#include <atomic>

#include "base/test_hooks.h"
#include "dist/body.h"
#include "dist/pipeline_runs.h"
#include "pipeline/schedule_csv.h"
#include "support/test.h"

namespace tessera::test::pipeline_errors_test {
namespace {

using pipeline::Kind;
using pipeline::ValidProgram;

ValidProgram program_of(Kind kind, int ranks, int micro_batches) {
  return ValidProgram(
      make_schedule(kind, {ranks, pipeline::row_of(kind).stages_per_rank, micro_batches}));
}

/// Returns what each rank is told where its stages are those of `toy_of(rank)`.
template <class ToyOf>
std::vector<std::string> errors_with(const std::vector<ValidProgram>& programs,
                                     const ToyOf& toy_of) {
  const int count = programs.front().schedule().ranks();
  return errors_of(count, [&](World& world) {
    const auto& program =
        programs.at(std::min(static_cast<std::size_t>(world.rank()), programs.size() - 1));
    pipeline::Runner runner(pipeline::ties_of(stages_mesh(world)));
    const Mine mine(toy_of(world.rank()), program.schedule(), world.rank());
    runner.run(program, mine.pointers(), {});
  });
}

struct Throws {
  const char* what;  ///< as Toy::midst; "W": that slot, before it computes
  int stage;
  std::int64_t micro_batch;
  std::string slot;
  bool others_wait = true;  ///< for what comes after it

  /// As the runner names it. A W is known to be of its stage where something of it computes.
  std::string place() const {
    const auto named = concat("slot ", slot);
    return what == std::string("W")
               ? named
               : concat(named, " (stage ", stage, ", micro-batch ", micro_batch, ")");
  }
};

/// Throws on the first call at that place.
class Mishap {
 public:
  explicit Mishap(Throws where) : where_(std::move(where)) {}
  void come_to(const std::string& what, int stage, std::int64_t micro_batch) {
    if (what != where_.what || stage != where_.stage || micro_batch != where_.micro_batch) return;
    if (armed_.exchange(false)) throw std::runtime_error("a stage's own mishap");
  }

 private:
  const Throws where_;
  std::atomic<bool> armed_ = true;
};

/// A rank throws; then recover(), and a step. How many other ranks were told.
std::ptrdiff_t expect_a_named_end_and_a_right_step(const ValidProgram& program,
                                                   const Throws& throws, ThreadBackend backend) {
  SCOPED_TRACE(concat(throws.what, " at ", throws.place()));
  const auto& schedule = program.schedule();
  Mishap mishap(throws);
  Toy toy;
  toy.stages = schedule.stages();
  const auto expected = run_in_one_process(toy, schedule.micro_batches);
  toy.midst = [&](const std::string& what, int stage, std::int64_t micro_batch) {
    mishap.come_to(what, stage, micro_batch);
  };
  std::vector<std::string> errors(static_cast<std::size_t>(schedule.ranks()));
  Left left;
  std::mutex mutex;
  RankBarrier all_have_ended(schedule.ranks());
  ranks(schedule.ranks(), backend).run([&](World& world) {
    RankBarrier::Seat seat(all_have_ended);
    const test_hooks::Set weights(test_hooks::computing, [&](const pipeline::Action* action) {
      if (action == nullptr || action->kind != pipeline::ActionKind::kWeightGradient) return;
      mishap.come_to("W", action->stage, action->micro_batch);
    });
    pipeline::Runner runner(pipeline::ties_of(stages_mesh(world)));
    {
      const Mine mine(toy, schedule, world.rank());
      errors[static_cast<std::size_t>(world.rank())] =
          thrown_by([&] { runner.run(program, mine.pointers(), {}); });
    }
    seat.wait();  // a recovery ends what others are still in
    world.recover();
    const Mine mine(toy, schedule, world.rank());
    const auto results = runner.run(program, mine.pointers(), {});
    const std::lock_guard lock(mutex);
    mine.add_to(left, results);
  });
  const auto thrower =
      static_cast<std::size_t>(schedule.rank_of[static_cast<std::size_t>(throws.stage)]);
  const auto named =
      Says(concat("rank ", thrower, ", ", throws.place(), ": "), "a stage's own mishap");
  EXPECT_THAT(errors[thrower], named);
  if (throws.others_wait) {
    EXPECT_THAT(errors, Each(named));
  } else {  // who waits for nothing that comes after it ends well
    EXPECT_THAT(errors, Each(AnyOf(std::string(), named)));
  }
  expect_same_left(left, expected, toy.numbers);
  return std::ranges::count_if(errors, [](const auto& error) { return !error.empty(); }) - 1;
}

TEST(PipelineErrors, AnExceptionInASlotEndsAllRanksByNameAndTheNextStepIsRight) {
  const Throws all[] = {{"F", 0, 0, "0F0"},     {"F", 1, 2, "1F2"},        {"F", 3, 3, "3F3"},
                        {"B", 3, 0, "3I0"},     {"B", 0, 3, "0I3", false}, {"B", 2, 1, "2I1"},
                        {"roots", 1, 2, "1I2"}, {"back", 2, 3, "2I3"}};
  const auto program = program_of(Kind::kZeroBubbleV, 2, 4);
  for (const auto& one : all) {
    expect_a_named_end_and_a_right_step(program, one, ThreadBackend::kInProcess);
  }
}

/// Anywhere in the lists of several ranks.
Throws random_place(const pipeline::Schedule& schedule, tessera::testing::Dice& dice) {
  const auto& slot = dice.pick(dice.pick(schedule.slots));
  const auto& action = slot.paired && dice.chance(50) ? *slot.paired : slot.action;
  // A stage's own code runs at both ends of an I or B; its first one hands nothing back.
  const std::vector<const char*> backward{"B", "roots", "back"};
  const char* what = "F";
  if (action.kind == pipeline::ActionKind::kWeightGradient) what = "W";
  if (action.gives_input_gradient())
    what = backward.at(static_cast<std::size_t>(dice.roll(action.stage > 0 ? 3 : 2)));
  return {what, action.stage, action.micro_batch, to_string(slot), /*others_wait=*/false};
}

TEST(PipelineErrors, AnExceptionAnywhereInRandomSchedulesEndsTheSameWay) {
  constexpr int kPlaces = 40;
  tessera::testing::Dice dice(6);
  std::set<std::string> where;
  std::ptrdiff_t told = 0;
  for (int i = 0; i < kPlaces; ++i) {
    auto schedule = tessera::testing::random_schedule(dice);
    while (schedule.ranks() == 1) schedule = tessera::testing::random_schedule(dice);
    const Throws one = random_place(schedule, dice);
    SCOPED_TRACE(concat("case ", i, ": ", schedule.ranks(), " ranks"));
    where.insert(one.what);
    told +=
        expect_a_named_end_and_a_right_step(ValidProgram(schedule), one, ThreadBackend::kInProcess);
  }
  EXPECT_EQ(where, (std::set<std::string>{"F", "B", "roots", "back", "W"}));
  EXPECT_GE(told, kPlaces) << "one other rank in most of them, at least";
}

// Micro-batch 0 has one row, micro-batch 1 has two.
TEST(PipelineErrors, SwappedMessagesOfOtherShapesEndAllRanksByName) {
  const test_hooks::Set swaps(test_hooks::sent_tag, [](comm::P2PTag tag) {
    const bool is_one = tag.direction == comm::P2PTag::Direction::kForward && tag.micro_batch < 2;
    if (is_one) tag.micro_batch = 1 - tag.micro_batch;
    return tag;
  });
  const auto errors =
      errors_with({program_of(Kind::kGPipe, 2, 2)}, [](int /*rank*/) { return Toy(); });
  EXPECT_THAT(errors, Each(Says("ranks disagree", "activations of stage 0, micro-batch", "[1, 4]",
                                "[2, 4]")));
}

TEST(PipelineErrors, OverGlooTheyEndAlike) {
  const Throws all[] = {{"F", 1, 2, "1F2"}, {"B", 2, 1, "2I1"}};
  const auto program = program_of(Kind::kZeroBubbleV, 2, 4);
  for (const auto& one : all) {
    expect_a_named_end_and_a_right_step(program, one, ThreadBackend::kGloo);
  }
}

/// A stage whose borders a test changes.
class Declares : public ToyStage {
 public:
  using Change = std::function<void(pipeline::Boundary&)>;
  Declares(const Toy& toy, int stage, Change input, Change output)
      : ToyStage(toy, stage), input_(std::move(input)), output_(std::move(output)) {}
  pipeline::Boundary input(std::int64_t micro_batch) const override {
    return changed(ToyStage::input(micro_batch), input_);
  }
  pipeline::Boundary output(std::int64_t micro_batch) const override {
    return changed(ToyStage::output(micro_batch), output_);
  }

 private:
  static pipeline::Boundary changed(pipeline::Boundary boundary, const Change& change) {
    if (change) change(boundary);
    return boundary;
  }
  Change input_, output_;
};

std::vector<std::string> errors_of_borders(const Declares::Change& output_of_first,
                                           const Declares::Change& input_of_second) {
  const auto program = program_of(Kind::kOneFOneB, 2, 2);
  return errors_of(2, [&](World& world) {
    pipeline::Runner runner(pipeline::ties_of(stages_mesh(world)));
    Declares stage(Toy{}, world.rank(), input_of_second, output_of_first);
    runner.run(program, {&stage}, {});
  });
}

TEST(PipelineErrors, BordersThatDifferAreRefusedOnAllRanksBeforeAnythingIsSent) {
  using Border = pipeline::Boundary;
  const auto told = [](const Declares::Change& output, const Declares::Change& input,
                       const std::string& one, const std::string& other) {
    EXPECT_THAT(errors_of_borders(output, input), Each(Says("between stages 0 and 1", one, other)));
  };
  told([](Border& b) { b.activations[2].dtype = at::kBFloat16; }, {},
       "'micro-batch 0, tensor 2: BFloat16 [1, 4] with a gradient'",
       "'micro-batch 0, tensor 2: Float [1, 4] with a gradient'");
  told(
      {}, [](Border& b) { b.activations[0].shape = {1, 5}; },
      "'micro-batch 0, tensor 0: Float [1, 4] with a gradient'",
      "'micro-batch 0, tensor 0: Float [1, 5] with a gradient'");
  told(
      {}, [](Border& b) { b.activations[0].has_gradient = false; },
      "tensor 0: Float [1, 4] with a gradient'", "tensor 0: Float [1, 4]'");
  told([](Border& b) { b.activations.pop_back(); }, {}, "'micro-batch 0, value back 0: Long [4]'",
       "'micro-batch 0, tensor 2: Float [1, 4] with a gradient'");
  told([](Border& b) { b.back.clear(); }, {}, "'micro-batch 1, tensor 0",
       "value back 0: Long [4]'");
  EXPECT_THAT(errors_of_borders([](Border& b) { b.activations[1].has_gradient = true; },
                                [](Border& b) { b.activations[1].has_gradient = true; }),
              Each(Says("found a gradient of Long")));
  const auto many = [](Border& b) { b.activations.resize(17, b.activations.front()); };
  EXPECT_THAT(errors_of_borders(many, many),
              Each(Says("found 17 tensors in a direction, expected at most 16")));
}

// Both ends declare it, and the stage returns something else.
TEST(PipelineErrors, ResultsThatAreNotAsDeclaredAreRefusedByName) {
  const auto both = [](const Declares::Change& change) {
    return errors_of_borders(change, change);
  };
  EXPECT_THAT(both([](auto& b) { b.activations[0].dtype = at::kDouble; }),
              all_and_one(Says("slot 0F0 (stage 0, micro-batch 0)",
                               "output 0: found Float [1, 4], expected Double [1, 4]")));
  EXPECT_THAT(both([](auto& b) { b.activations[2].shape = {7}; }),
              all_and_one(Says("output 2: found Float [1, 4], expected Float [7]")));
  EXPECT_THAT(both([](auto& b) { b.activations.pop_back(); }),
              all_and_one(Says("output: found 3 tensors, expected 2")));
  EXPECT_THAT(
      both([](auto& b) { b.activations[2].has_gradient = false; }),
      all_and_one(Says("output 2: found a tensor that requires grad", "declare has_gradient")));
  EXPECT_THAT(both([](auto& b) { b.back.front().shape = {5}; }),
              all_and_one(Says("value back 0: found Long [4], expected Long [5]")));
}

TEST(PipelineErrors, ShapesThatChangeBetweenStepsAreComparedAgain) {
  const auto program = program_of(Kind::kOneFOneB, 2, 3);
  std::vector<std::string> errors(2);
  std::vector<at::Tensor> losses;
  Toy more;
  more.more_rows = 2;
  ranks(2).run([&](World& world) {
    pipeline::Runner runner(pipeline::ties_of(stages_mesh(world)));
    const Mine usual(Toy{}, program.schedule(), world.rank());
    const Mine longer(more, program.schedule(), world.rank());
    runner.run(program, usual.pointers(), {});
    const auto results = runner.run(program, longer.pointers(), {});
    if (world.rank() == 1) {
      for (const auto& result : results) losses.push_back(result.at(0));
    }
    // Now at one end alone.
    const auto& mine = world.rank() == 0 ? longer : usual;
    errors[static_cast<std::size_t>(world.rank())] =
        thrown_by([&] { runner.run(program, mine.pointers(), {}); });
  });
  EXPECT_THAT(errors, Each(Says("'micro-batch 0, tensor 0: Float [3, 4]",
                                "'micro-batch 0, tensor 0: Float [1, 4]")));
  const auto expected = run_in_one_process(more, 3);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(losses.at(i), expected.losses[i]));
}

TEST(PipelineErrors, RanksWithDifferentSchedulesAreTold) {
  const auto toy_of = [](int) { return Toy{}; };
  EXPECT_THAT(
      errors_with({program_of(Kind::kGPipe, 2, 2), program_of(Kind::kOneFOneB, 2, 2)}, toy_of),
      Each(Says("another schedule than on the first")));
  const auto training = program_of(Kind::kGPipe, 2, 2);
  EXPECT_THAT(errors_with({training, ValidProgram(forward_only(training.schedule()),
                                                  pipeline::Passes::kForward)},
                          toy_of),
              Each(Says("or a step of another kind")));
}

TEST(PipelineErrors, SchedulesThatCannotRunAreNoPrograms) {
  const std::string valid = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1B1\n";
  const auto error_with = [&](const std::string& slot, const std::string& instead) {
    auto text = valid;
    text.replace(text.find(slot), slot.size(), instead);
    return thrown_by([&] { ValidProgram(pipeline::parse_csv(text, "test")); });
  };
  EXPECT_EQ(error_with("0W0", "0W0"), "");
  EXPECT_THAT(error_with(",0W0", ""),
              Says("missing: stage 0: found no W after the I of micro-batch 0"));
  EXPECT_THAT(error_with("0W1", "0W0"), Says("repeated", "missing"));
  EXPECT_THAT(error_with("0W1", "0W1,0W1"), Says("repeated"));
  EXPECT_THAT(error_with("0W1", "0W2"), Says("no I before the W of micro-batch 2"));
  EXPECT_THAT(error_with("0I0,0W0", "0W0,0I0"), Says("dependency"));
  EXPECT_THAT(error_with("1F0,1I0", "1I0,1F0"), Says("dependency"));
}

}  // namespace
}  // namespace tessera::test::pipeline_errors_test
