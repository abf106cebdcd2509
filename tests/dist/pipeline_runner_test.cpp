// The runner against the same stages in one process, one micro-batch after the other: every kind of
// schedule, any valid one, messages that take their time; and what is refused.
#include <ATen/ATen.h>

#include <array>
#include <chrono>
#include <mutex>
#include <thread>

#include "base/trace.h"
#include "caught.h"
#include "dist/pipeline_runs.h"
#include "pipeline/runner.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/slot_trace.h"
#include "support/test.h"

namespace tessera::test::pipeline_runner_test {
namespace {

using namespace tessera::pipeline;  // NOLINT(google-build-using-namespace): what is tested

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
        expect_same_left(run(program, toy), run_in_one_process(toy, shape.micro_batches),
                         toy.numbers);
      }
    }
  }
}

TEST(PipelineRunner, OverGlooItIsTheSame) {
  for (const Kind kind : {Kind::kOneFOneB, Kind::kInterleavedZeroBubble, Kind::kDualPipeV}) {
    Toy toy;
    toy.stages = 2 * row_of(kind).stages_per_rank;
    const ValidProgram program(make_schedule(kind, {2, row_of(kind).stages_per_rank, 6}));
    expect_same_left(run(program, toy, ThreadBackend::kGloo), run_in_one_process(toy, 6),
                     toy.numbers);
  }
}

/// Random schedules whose messages travel as `way_of` says: the bits of one process.
template <class WayOf>
void expect_bits_of_one_process(std::uint64_t seed, int schedules, const WayOf& way_of) {
  tessera::testing::Dice dice(seed);
  for (int i = 0; i < schedules; ++i) {
    SCOPED_TRACE(concat("schedule ", i));
    const auto schedule = tessera::testing::random_schedule(dice);
    Toy toy;
    toy.stages = schedule.stages();
    toy.seed = static_cast<std::uint64_t>(i);
    toy.frozen = dice.chance(25) ? dice.roll(toy.stages + 1) : 0;
    // Receives that are posted early, where the list says, or now this and now that.
    toy.more_rows = std::array<std::int64_t, 3>{0, 600, 510}[static_cast<std::size_t>(i % 3)];
    const Travel travel(way_of(static_cast<std::uint64_t>(i)));
    expect_same_left(run(ValidProgram(schedule), toy),
                     run_in_one_process(toy, schedule.micro_batches), toy.numbers);
    if (::testing::Test::HasFailure()) return;
  }
}

// A send ends with its receive, and each message takes a time of its own.
TEST(PipelineRunner, RandomSchedulesEndWithTheSameBits) {
  expect_bits_of_one_process(
      18, 500, [](std::uint64_t i) { return Way{.buffered = false, .delays = i + 1}; });
}

// Sends end at once in two of three runs, and half of the runs have no delays.
TEST(PipelineRunner, RandomSchedulesOverMessagesOfEachKindEndWithTheSameBits) {
  expect_bits_of_one_process(20, 150, [](std::uint64_t i) {
    return Way{.buffered = i % 3 != 2, .delays = i % 2 == 0 ? i + 1 : 0};
  });
}

// As docs/pipeline.md says: where a megabyte is held, or more than 64 messages.
TEST(PipelineRunner, SendsAreLookedAfterWhereTheyHoldMuch) {
  EXPECT_FALSE(Messages::are_worth_asking(64, (std::size_t{1} << 20) - 1));
  EXPECT_TRUE(Messages::are_worth_asking(65, 0));
  EXPECT_TRUE(Messages::are_worth_asking(1, std::size_t{1} << 20));
}

TEST(PipelineRunner, SchedulesInAnyOrderEndWithTheSameSums) {
  tessera::testing::Dice dice(19);
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE(concat("schedule ", i));
    const auto schedule =
        tessera::testing::random_schedule(dice, tessera::testing::MicroBatchOrder::kAny);
    Toy toy;
    toy.stages = schedule.stages();
    toy.seed = static_cast<std::uint64_t>(i);
    toy.numbers = Numbers::kWhole;
    const Travel travel({dice.chance(50), static_cast<std::uint64_t>(i + 1)});
    expect_same_left(run(ValidProgram(schedule), toy),
                     run_in_one_process(toy, schedule.micro_batches), toy.numbers);
    if (HasFailure()) return;
  }
}

/// Counts the receives that are posted before anything is sent.
class CountingP2P final : public comm::P2P {
 public:
  CountingP2P(std::shared_ptr<comm::P2P> inner, int ranks)
      : P2P({comm::all_ranks(ranks), inner->rank(), device_here()}), inner_(std::move(inner)) {}

  int posted_first = 0;

 private:
  std::unique_ptr<comm::Transfer> post(comm::P2POp op) override {
    inner_->begin_step(op.tag.step, op.extent);
    if (op.sends()) {
      has_sent_ = true;
      return inner_->send(op.peer, op.tag, op.tensor);
    }
    if (!has_sent_) ++posted_first;
    return inner_->receive(op.peer, op.tag, op.tensor);
  }

  const std::shared_ptr<comm::P2P> inner_;
  bool has_sent_ = false;
};

// Rank 1 of a 1F1B runs F0 and B0 before it sends. Three tensors a message.
TEST(PipelineRunner, SmallReceivesArePostedAheadOfTheList) {
  constexpr int kMicroBatches = 12;
  const ValidProgram program(make_schedule(Kind::kOneFOneB, {2, 1, kMicroBatches}));
  const auto posted_first = [&](std::int64_t more_rows) {
    Toy toy;
    toy.more_rows = more_rows;
    int found = 0;
    ranks(2, ThreadBackend::kInProcess).run([&](World& world) {
      auto ties = ties_of(stages_mesh(world));
      const auto counting = std::make_shared<CountingP2P>(ties.p2p, 2);
      ties.p2p = counting;
      Runner runner(ties);
      const Mine mine(toy, program.schedule(), world.rank());
      runner.run(program, mine.pointers(), {});
      if (world.rank() == 1) found = counting->posted_first;
    });
    return found;
  };
  EXPECT_EQ(posted_first(1), 3 * (8 + 1));
  EXPECT_EQ(posted_first(1000), 3 * 2);
}

/// Two messages that leave each under the other's tag.
struct Swapped {
  comm::P2PTag::Direction direction;
  std::int32_t stage;
  std::pair<std::int32_t, std::int32_t> micro_batches = {};
  std::pair<std::int32_t, std::int32_t> tensors = {};

  comm::P2PTag of(comm::P2PTag tag) const {
    if (tag.direction != direction || tag.stage != stage) return tag;
    const auto other = [](std::int32_t& number, const auto& pair) {
      if (number == pair.first || number == pair.second) {
        number = number == pair.first ? pair.second : pair.first;
      }
    };
    other(tag.micro_batch, micro_batches);
    if (tag.micro_batch == 0) other(tag.index, tensors);
    return tag;
  }
};

// With equal shapes nothing is refused: results are compared. GPipe sends all before any of it is
// waited for, so that no wait is in the way.
TEST(PipelineRunner, MessagesThatAreSwappedAreCaught) {
  using Direction = comm::P2PTag::Direction;
  constexpr int kMicroBatches = 6;
  Toy toy;
  const ValidProgram program(make_schedule(Kind::kGPipe, {2, 1, kMicroBatches}));
  const auto expected = run_in_one_process(toy, kMicroBatches);
  expect_same_left(run(program, toy), expected, toy.numbers);
  // Micro-batches 0 and 4 have one row each; of an activation tensors 0 and 2 are alike.
  for (const Swapped& swapped :
       {Swapped{Direction::kForward, 0, {0, 4}}, Swapped{Direction::kBackward, 1, {0, 4}},
        Swapped{Direction::kForward, 0, {}, {0, 2}}}) {
    const test_hooks::Set hook(test_hooks::sent_tag,
                               [&](const comm::P2PTag& tag) { return swapped.of(tag); });
    const auto left = run(program, toy);
    EXPECT_FALSE(failures_of([&] { expect_same_left(left, expected, toy.numbers); }).empty())
        << "direction " << static_cast<int>(swapped.direction) << ", tensors "
        << swapped.tensors.second;
  }
}

/// Tags of all messages that arrive while it lives, in any order.
class Seen {
 public:
  Seen()
      : hook_(test_hooks::message_delay, [this](const comm::P2PTag& tag) {
          const std::lock_guard lock(mutex_);
          tags_.push_back(tag);
          return std::chrono::microseconds(0);
        }) {}
  std::vector<comm::P2PTag> tags() const { return tags_; }

 private:
  std::mutex mutex_;
  std::vector<comm::P2PTag> tags_;
  test_hooks::Set<decltype(test_hooks::message_delay)> hook_;
};

/// Runs the program once on its ranks; `body` is called on each.
template <class Body>
void run_on_ranks(const ValidProgram& program, const Toy& toy, const Body& body) {
  ranks(program.schedule().ranks()).run([&](World& world) {
    Runner runner(ties_of(stages_mesh(world)));
    const Mine mine(toy, program.schedule(), world.rank());
    body(world, runner, mine);
  });
}

TEST(PipelineRunner, ForwardsAloneSendNothingBackAndMakeNoGraph) {
  const auto training = make_schedule(Kind::kDualPipeV, {2, 2, 4});
  Toy toy;
  toy.stages = 4;
  const ValidProgram program(forward_only(training), Passes::kForward);
  const auto expected = run_in_one_process(toy, 4);
  const Seen seen;
  run_on_ranks(program, toy, [&](World& world, Runner& runner, const Mine& mine) {
    const auto results = runner.run(program, mine.pointers(), {});
    ASSERT_EQ(results.size(), world.rank() == 0 ? 4U : 0U);
    for (std::size_t k = 0; k < results.size(); ++k) {
      EXPECT_FALSE(results[k].at(0).requires_grad());
      EXPECT_TRUE(same_bits(results[k].at(0), expected.losses[k]));
    }
    for (const auto& stage : mine.stages) EXPECT_FALSE(stage->weight.grad().defined());
  });
  for (const auto& tag : seen.tags()) {
    EXPECT_EQ(tag.direction, comm::P2PTag::Direction::kForward);
  }
  EXPECT_EQ(seen.tags().size(), 4U * 2 * 3);  // micro-batches, borders between ranks, tensors
}

TEST(PipelineRunner, NothingComesBackToAFrozenFront) {
  const auto schedule = make_schedule(Kind::kZeroBubble, {4, 1, 4});
  Toy toy;
  toy.stages = 4;
  toy.frozen = 2;
  toy.totals = false;
  const Seen seen;
  const auto left = run(ValidProgram(schedule), toy);
  const auto tags = seen.tags();
  const auto back = std::ranges::count_if(tags, [](const auto& tag) {
    EXPECT_TRUE(tag.direction == comm::P2PTag::Direction::kForward || tag.stage == 3);
    return tag.direction == comm::P2PTag::Direction::kBackward;
  });
  EXPECT_EQ(back, 4 * 2);  // of the last border: two tensors have a gradient
  expect_same_left(left, run_in_one_process(toy, 4), toy.numbers);
  EXPECT_FALSE(left.gradients.at("weight 1").defined());
  EXPECT_TRUE(left.gradients.at("weight 2").defined());
}

// The stage that turns around has both ends on one rank.
TEST(PipelineRunner, TheTurnOfAVSendsNothing) {
  const auto schedule = make_schedule(Kind::kZeroBubbleV, {2, 2, 4});
  Toy toy;
  toy.stages = 4;
  const Seen seen;
  run(ValidProgram(schedule), toy);
  for (const auto& tag : seen.tags()) {
    const bool forward = tag.direction == comm::P2PTag::Direction::kForward;
    EXPECT_NE(forward ? tag.stage : tag.stage - 1, 1) << "between stages 1 and 2";
  }
  // Micro-batches, borders between ranks; three tensors, and two gradients with a value.
  EXPECT_EQ(seen.tags().size(), 4U * 2 * (3 + 3));
}

// The size of a result that is compared by itself: more than a megabyte.
constexpr std::int64_t kLarge = 300'000;

/// Results whose memory it watches.
class Watched : public Stage {
 public:
  explicit Watched(bool is_first, bool trains = true) : is_first_(is_first) {
    weight.requires_grad_(trains);
  }
  Boundary input(std::int64_t) const override {
    return {{{{kLarge}, at::kFloat, weight.requires_grad()}}};
  }
  Boundary output(std::int64_t) const override { return input(0); }
  pipeline::Tensors forward(std::int64_t, const pipeline::Tensors& inputs) override {
    if (!is_first_) {
      if (before) before();
      return {inputs[0].sum() * 2.0};
    }
    const auto result = weight * 3.0;  // its backward needs no result
    memory.emplace_back(result.storage().getWeakStorageImpl());
    most = std::max(most, alive());
    return {result};
  }
  Roots roots(std::int64_t micro_batch, const pipeline::Tensors& results,
              const pipeline::Tensors& back) override {
    // On a device only the stream waits for the first gradient: here the host waits for the stream,
    // and the slot after this one lets go what has been sent.
    const bool host_waits = weight.is_cpu();
    if (is_first_ && !host_waits && micro_batch == 0) weight.select(0, 0).item<float>();
    if (is_first_ && micro_batch == (host_waits ? 0 : 1)) kept = alive();
    return Stage::roots(micro_batch, results, back);
  }
  std::int64_t alive() const {
    return std::ranges::count_if(memory, [](const auto& one) { return !one.expired(); });
  }
  at::Tensor weight = here(at::ones({kLarge}));
  std::function<void()> before;  ///< runs inside the last stage's forward
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  std::int64_t kept = -1, most = 0;

 private:
  bool is_first_;
};

TEST(PipelineRunner, TheMemoryOfAResultGoesWhenItIsSent) {
  const ValidProgram program(make_schedule(Kind::kGPipe, {2, 1, 6}));
  for (const bool buffered : {false, true}) {
    const Travel travel({buffered, 0});
    ranks(2).run([&](World& world) {
      Runner runner(ties_of(stages_mesh(world)));
      Watched stage(world.rank() == 0);
      runner.run(program, {&stage}, {});
      if (world.rank() != 0) return;
      EXPECT_EQ(stage.memory.size(), 6U);
      EXPECT_EQ(stage.kept, 0) << "of 6 as the backwards begin";
      EXPECT_TRUE(stage.weight.grad().equal(here(at::full({kLarge}, 36.0))));
    });
  }
}

// Naive: a rank to which nothing comes back runs all of its slots, and keeps all results at once.
TEST(PipelineRunner, AFrozenFrontRunsNoFurtherAheadThanTheSchedule) {
  const ValidProgram program(make_schedule(Kind::kOneFOneB, {2, 1, 8}));
  ranks(2).run([&](World& world) {
    Runner runner(ties_of(stages_mesh(world)));
    Watched stage(world.rank() == 0, /*trains=*/false);
    stage.before = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
    runner.run(program, {&stage}, {});
    if (world.rank() != 0) return;
    EXPECT_EQ(stage.memory.size(), 8U);
    EXPECT_LE(stage.most, 3) << "of 8: one that is made, two that wait";
  });
}

// Naive: the first rank runs through a whole batch, and keeps all results at once.
TEST(PipelineRunner, ForwardsAloneRunNoFurtherAheadThanAFewMessages) {
  const ValidProgram program(forward_only(make_schedule(Kind::kGPipe, {2, 1, 12})),
                             Passes::kForward);
  EXPECT_TRUE(program.may_wait_for_sends());
  ranks(2).run([&](World& world) {
    Runner runner(ties_of(stages_mesh(world)));
    Watched stage(world.rank() == 0);
    stage.before = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
    runner.run(program, {&stage}, {});
    if (world.rank() != 0) return;
    EXPECT_EQ(stage.memory.size(), 12U);
    // One that is made, one a rank under way, and what the receives that are posted ahead hold.
    EXPECT_LE(stage.most, 5) << "of 12";
  });
}

/// The first of two stages hands two buffers on, of which one has a graph, the last one hands one
/// back, and both refill theirs for each micro-batch.
class Refills : public Stage {
 public:
  enum class Kind {
    kTensors,
    kView,    ///< that with a graph goes as a view
    kMemory,  ///< that without one is memory of the stage's own
  };
  Refills(int stage, Kind kind) : stage_(stage), kind_(kind) {}
  Boundary input(std::int64_t) const override {
    return {{{{1}, at::kFloat}, {{1}, at::kFloat, false}}, {{{1}, at::kFloat}}};
  }
  Boundary output(std::int64_t) const override { return input(0); }
  pipeline::Tensors forward(std::int64_t micro_batch, const pipeline::Tensors& inputs) override {
    if (stage_ == 1) return {(inputs[0] * inputs[1]).sum()};
    buffer_.fill_(micro_batch + 1);
    with_graph_.detach_();
    with_graph_.copy_(weight * static_cast<double>(micro_batch + 1));
    if (kind_ == Kind::kView) return {with_graph_.view({1}), buffer_};
    if (kind_ == Kind::kTensors) return {with_graph_, buffer_};
    number_ = static_cast<float>(micro_batch + 1);
    return {with_graph_, at::from_blob(&number_, {1})};
  }
  Roots roots(std::int64_t micro_batch, const pipeline::Tensors& results,
              const pipeline::Tensors& back) override {
    if (stage_ == 0) came_back.push_back(back.at(0).item<float>());
    return Stage::roots(micro_batch, results, back);
  }
  pipeline::Tensors back(std::int64_t micro_batch) override {
    buffer_.fill_(10 * (micro_batch + 1));
    return {buffer_};
  }
  at::Tensor weight = here(at::ones({1})).requires_grad_();
  std::vector<float> came_back;

 private:
  int stage_;
  Kind kind_;
  float number_ = 0.0F;
  at::Tensor buffer_ = here(at::zeros({1}));
  at::Tensor with_graph_ = here(at::zeros({1}));
};

void expect_as_it_was(Refills::Kind kind) {
  const test_hooks::Set slow(test_hooks::message_delay,
                             [](const comm::P2PTag&) { return std::chrono::microseconds(20'000); });
  for (const std::string lists :
       {"0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"}) {
    SCOPED_TRACE(lists);
    const ValidProgram program(parse_csv(lists, "test"));
    ranks(program.schedule().ranks()).run([&](World& world) {
      Refills first(0, kind), last(1, kind);
      std::vector<Stage*> stages;
      for (const int id : program.schedule().stages_of(world.rank())) {
        stages.push_back(id == 0 ? &first : &last);
      }
      Runner runner(ties_of(stages_mesh(world)));
      const auto results = runner.run(program, stages, {});
      for (std::size_t k = 0; k < results.size(); ++k) {
        EXPECT_EQ(results[k].at(0).item<float>(), static_cast<float>((k + 1) * (k + 1)));
      }
      if (stages.front() != &first) return;
      EXPECT_EQ(first.came_back, (std::vector<float>{10, 20}));
      EXPECT_EQ(first.weight.grad().item<float>(), 5.0F);
    });
  }
}

// Naive: a message that leaves late, or the turn of a V, has the values of a later micro-batch.
TEST(PipelineRunner, ABufferThatAStageRefillsIsHandedOnAsItWas) {
  for (const auto kind : {Refills::Kind::kTensors, Refills::Kind::kView}) expect_as_it_was(kind);
}

// Naive: no other tensor refers to it, so that no one writes to it.
TEST(PipelineRunner, HostMemoryThatAStageRefillsIsHandedOnAsItWas) {
  expect_as_it_was(Refills::Kind::kMemory);
}

/// Adds to its loss in roots().
class AddsInRoots : public Stage {
 public:
  Boundary input(std::int64_t) const override { return {}; }
  Boundary output(std::int64_t) const override { return {}; }
  pipeline::Tensors forward(std::int64_t, const pipeline::Tensors&) override {
    twice_ = weight * 2.0;
    return {twice_.sum()};
  }
  Roots roots(std::int64_t micro_batch, const pipeline::Tensors& results,
              const pipeline::Tensors& back) override {
    auto roots = Stage::roots(micro_batch, results, back);
    roots.tensors.push_back(twice_.pow(2).sum());
    roots.gradients.push_back(here(at::ones({})));
    return roots;
  }
  at::Tensor weight = here(at::ones({1})).requires_grad_();

 private:
  at::Tensor twice_;
};

// Naive: what is added there is left out where the caller computes without gradients.
TEST_ON_RANKS(PipelineRunner, RootsAreMadeWithGradModeAsForwardsAre, 1) {
  Runner runner(ties_of(stages_mesh(world)));
  AddsInRoots stage;
  const at::NoGradGuard no_grad;
  runner.run(ValidProgram(parse_csv("0F0,0B0\n", "test")), {&stage}, {});
  EXPECT_EQ(stage.weight.grad().item<float>(), 10.0F);
}

TEST(PipelineRunner, RunnersOfOneMailTakeTurns) {
  const auto training = make_schedule(Kind::kOneFOneB, {2, 1, 3});
  const ValidProgram program(training);
  const ValidProgram forwards(forward_only(training), Passes::kForward);
  const auto expected = run_in_one_process(Toy{}, 3);
  run_on_ranks(program, Toy{}, [&](World& world, Runner& one, const Mine& mine) {
    Runner other(ties_of(stages_mesh(world)));
    for (int step = 0; step < 3; ++step) {
      other.run(forwards, mine.pointers(), {});
      for (const auto& stage : mine.stages) {
        stage->weight.mutable_grad().reset();
        stage->bias.mutable_grad().reset();
      }
      one.run(program, mine.pointers(), {});
      Left left;
      add_gradients(left, world.rank(), *mine.stages.front());
      for (const auto& [name, gradient] : left.gradients) {
        EXPECT_TRUE(same_bits(gradient, expected.gradients.at(name))) << name;
      }
    }
  });
}

TEST(PipelineRunner, AFilesOwnMessagesAreRunAsTheyStand) {
  const auto schedule = make_schedule(Kind::kInterleavedZeroBubble, {2, 2, 4});
  Toy toy;
  toy.stages = 4;
  const auto expected = run_in_one_process(toy, 4);
  // Posted far ahead, and as late as can be; without any moves of parameters.
  for (const int ahead : {0, 1, 5}) {
    Program program = lower(schedule, ahead);
    for (auto& steps : program.steps) {
      std::erase_if(steps,
                    [](const Step& step) { return std::holds_alternative<Residency>(step); });
    }
    const auto read = parse_csv(to_csv(program), "test");
    expect_same_left(run(ValidProgram(read), toy), expected, toy.numbers);
    EXPECT_EQ(schedule_of(ValidProgram(read).program()), schedule);
  }
}

TEST(PipelineRunner, ATraceHasSlotsAndMessagesThatCostsAreReadFrom) {
  const ValidProgram program(make_schedule(Kind::kDualPipeV, {2, 2, 4}));
  Toy toy;
  toy.stages = 4;
  std::vector<std::string> events(2);
  const auto origin = TraceClock::now();
  run_on_ranks(program, toy, [&](World& world, Runner& runner, const Mine& mine) {
    const auto trace = std::make_shared<Trace>();
    {
      const TraceHere here(trace);
      runner.run(program, mine.pointers(), {});
    }
    events[static_cast<std::size_t>(world.rank())] =
        chrome_events(trace->take(), world.rank(), origin);
  });
  const auto costs = costs_from_trace(chrome_trace(events), "test", program.schedule());
  ASSERT_EQ(costs.size(), 4U);
  for (const auto& stage : costs) {
    EXPECT_GT(stage.forward, 0.0);
    EXPECT_GT(stage.of_backward(), 0.0);
  }
  EXPECT_GT(costs[0].send_forward + costs[2].send_forward, 0.0);
}

}  // namespace
}  // namespace tessera::test::pipeline_runner_test
