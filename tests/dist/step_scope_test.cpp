// A step as a scope: in any order of forwards, backwards and weight gradients of its stages,
// gradients have the bits of the loop over micro-batches, and nothing is gathered or reduced twice.

#include <random>

#include "dist/data_layout.h"
#include "dist/staged.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::test::step_scope_test {
namespace {

using ::testing::Combine;
using ::testing::Values;
using ::testing::ValuesIn;

constexpr int kMicroBatches = 4;
/// Both stages on one rank, as if the list of two ranks were interleaved.
constexpr const char* kOneForwardOneBackward =
    "F0.0 F0.1 F1.0 B1.0 B0.0 F0.2 F1.1 B1.1 B0.1 F0.3 F1.2 B1.2 B0.2 F1.3 B1.3 B0.3";
constexpr const char* kZeroBubble =
    "F0.0 F0.1 F1.0 I1.0 F0.2 I0.0 F1.1 I1.1 W1.0 I0.1 F1.2 I1.2 W0.0 F0.3 W1.1 I0.2 W0.1 W1.2 "
    "F1.3 B1.3 W0.2 I0.3 W0.3";
constexpr const char* kAllForwardsFirst =
    "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 B1.0 B1.1 B1.2 B1.3 B0.0 B0.1 B0.2 B0.3";

/// Compares steps with a scope to steps of the loop, each with its optimizer: the same bits, also
/// of what was gathered in the step before.
void expect_the_loop(World& world, int replicas, const StagedOptions& staged,
                     const PrecisionPolicy& policy, const std::vector<std::vector<Slot>>& lists,
                     const StepScopeOptions& options, const ShardOptions& root = {}) {
  const auto mesh = data_mesh(world, replicas);
  StagedModel model(mesh, staged, policy, root);
  StagedModel loop(mesh, staged, policy, root);
  const auto optimizer = make_sgd(model.handle, sgd(0.05));
  const auto loop_optimizer = make_sgd(loop.handle, sgd(0.05));
  for (int step = 0; step < static_cast<int>(lists.size()); ++step) {
    const auto& slots = lists[static_cast<std::size_t>(step)];
    const int micro_batches =
        1 + std::max_element(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) {
              return a.micro_batch < b.micro_batch;
            })->micro_batch;
    const auto input = inputs(world, step, staged.width);
    run_step(model, slots, options, input);
    run_loop(loop, micro_batches, input, options.sync_every_micro_batch);
    const auto expected = whole_gradients(loop.handle);
    EXPECT_TRUE(expected.at("scale").ne(0).all().item<bool>());
    expect_same(whole_gradients(model.handle), expected, concat("step ", step));
    optimizer->step();
    loop_optimizer->step();
    model.handle.zero_grad();
    loop.handle.zero_grad();
  }
}

std::vector<std::vector<Slot>> thrice(const char* list) {
  return {slots_of(list), slots_of(list), slots_of(list)};
}

class StepScopes : public ::testing::TestWithParam<std::tuple<DataLayout, StepReshard>> {};
const std::vector<DataLayout> kLayouts{{1, 1}, {2, 1}, {3, 1},
                                       {2, 2}, {4, 2}, {2, 1, ThreadBackend::kGloo}};
INSTANTIATE_TEST_SUITE_P(Grid, StepScopes,
                         Combine(ValuesIn(kLayouts),
                                 Values(StepReshard::kStep, StepReshard::kMicroBatch)));

// Naive: weights of the last step, a micro-batch that is reduced alone, sums rounded on the way.
TEST_P_ON_RANKS(StepScopes, EveryOrderGivesTheBitsOfTheLoop, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  for (const auto* list : {kOneForwardOneBackward, kZeroBubble, kAllForwardsFirst}) {
    for (const auto& policy : {PrecisionPolicy{}, in_bfloat16()}) {
      SCOPED_TRACE(list);
      expect_the_loop(world, layout.replicas, {}, policy, thrice(list),
                      {.reshard = reshard, .schedule = list});
    }
  }
}

TEST_P_ON_RANKS(StepScopes, RecomputedUnitsGiveTheBitsOfTheLoop, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  for (const auto& staged : {StagedOptions{.mode = RecomputeMode::kFull},
                             StagedOptions{.mode = RecomputeMode::kSelective},
                             StagedOptions{.recomputes_outside = true}}) {
    for (const auto* list : {kOneForwardOneBackward, kZeroBubble}) {
      SCOPED_TRACE(list);
      expect_the_loop(world, layout.replicas, staged, {}, thrice(list),
                      {.reshard = reshard, .schedule = list});
    }
  }
}

TEST_P_ON_RANKS(StepScopes, EachMicroBatchMayBeReducedByItself, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  for (const auto* list : {kOneForwardOneBackward, kAllForwardsFirst}) {
    SCOPED_TRACE(list);
    expect_the_loop(world, layout.replicas, {}, {}, thrice(list),
                    {.reshard = reshard, .sync_every_micro_batch = true, .schedule = list});
  }
}

// The root's bucket holds what its stages are too small for, and what both of them use.
TEST_P_ON_RANKS(StepScopes, SmallBucketsOfTheRootAndAWeightOfTwoStages, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  for (const bool ties : {false, true}) {
    ShardOptions root;
    root.merge_below_bytes = ties ? 0 : 4096;
    for (const auto* list : {kOneForwardOneBackward, kZeroBubble}) {
      SCOPED_TRACE(list);
      // The second list adds to the tied weight in another order of stages and micro-batches.
      if (ties && list == kZeroBubble) continue;
      expect_the_loop(world, layout.replicas, {.ties = ties}, {}, thrice(list),
                      {.reshard = reshard, .schedule = list}, root);
    }
  }
}

TEST_P_ON_RANKS(StepScopes, AFrozenStageIsGatheredAndNothingElse, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  for (const int frozen : {0, 1}) {
    for (const auto* list : {kOneForwardOneBackward, kZeroBubble}) {
      expect_the_loop(world, layout.replicas, {.frozen = frozen}, {}, thrice(list),
                      {.reshard = reshard, .schedule = list});
    }
  }
}

/// Draws a list that keeps micro-batches in order on each stage, and is random otherwise. A full
/// backward comes after the weight gradients of the micro-batches before it.
std::vector<Slot> random_list(std::uint64_t seed, int stages, int micro_batches) {
  std::mt19937_64 random(seed);
  const auto count = static_cast<std::size_t>(stages);
  std::vector<int> forwards(count), backwards(count), weights(count);  // done, in order
  std::vector<std::vector<int>> pending(count);
  std::vector<Slot> slots;
  while (true) {
    std::vector<Slot> possible;
    for (int stage = 0; stage < stages; ++stage) {
      const auto i = static_cast<std::size_t>(stage);
      if (forwards[i] < micro_batches && (stage == 0 || forwards[i] < forwards[i - 1])) {
        possible.push_back({'F', stage, forwards[i]});
      }
      const bool is_last = stage + 1 == stages;
      if (backwards[i] < forwards[i] && (is_last || backwards[i] < backwards[i + 1])) {
        possible.push_back({'I', stage, backwards[i]});
        if (pending[i].empty()) possible.push_back({'B', stage, backwards[i]});
      }
      if (!pending[i].empty()) possible.push_back({'W', stage, pending[i].front()});
    }
    if (possible.empty()) return slots;
    const auto slot = possible[random() % possible.size()];
    const auto i = static_cast<std::size_t>(slot.stage);
    if (slot.kind == 'F') ++forwards[i];
    if (slot.kind == 'B' || slot.kind == 'I') ++backwards[i];
    if (slot.kind == 'I') pending[i].push_back(slot.micro_batch);
    if (slot.kind == 'W') pending[i].erase(pending[i].begin());
    slots.push_back(slot);
  }
}

TEST_P_ON_RANKS(StepScopes, RandomOrdersGiveTheBitsOfTheLoop, std::get<0>(GetParam())) {
  const auto& [layout, reshard] = GetParam();
  const std::vector<std::uint64_t> seeds{0, 1, 2, 3, 4, 5, 6, 7};
  for (const std::uint64_t seed : in_turn(seeds, 3, kLayouts, layout)) {
    SCOPED_TRACE(seed);
    const int stages = 1 + static_cast<int>(seed % 3);
    const auto list = random_list(seed, stages, 2 + static_cast<int>(seed % 4));
    const StagedOptions staged{.stages = stages,
                               .pieces = 1 + static_cast<int>(seed % 2),
                               .mode = seed % 4 == 3 ? RecomputeMode::kFull : RecomputeMode::kNone};
    expect_the_loop(world, layout.replicas, staged,
                    seed % 2 == 0 ? PrecisionPolicy{} : in_bfloat16(), {list, list},
                    {.reshard = reshard, .schedule = concat(seed)});
  }
}

// Naive: a parameter that one rank uses has a gradient there alone, an unused one has zeros.
TEST(StepScopes, ParametersThatSomeRanksOrNoOneUses) {
  for (const int count : {1, 2, 3}) {
    ranks(count).run([](World& world) {
      StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
      for (auto* each : {&model, &loop}) {
        each->module->pieces[0]->uses_gain = world.rank() == 0;
        each->module->pieces[3]->uses_gain = false;
      }
      for (int step = 0; step < 2; ++step) {
        const auto input = inputs(world, step, model.options.width);
        run_step(model, slots_of(kZeroBubble), {.schedule = "unused"}, input);
        run_loop(loop, kMicroBatches, input);
        expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
        const auto shards = model.handle.named_parameters();
        EXPECT_TRUE(shards["piece0.gain"].grad().defined());
        EXPECT_FALSE(shards["piece3.gain"].grad().defined());
        model.handle.zero_grad();
        loop.handle.zero_grad();
      }
    });
  }
}

// Micro-batches of one stage that enter different units are no record: each scope agrees again.
TEST(StepScopes, MicroBatchesThatEnterDifferentUnitsRecordEachTime) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    ranks(2).run([reshard](World& world) {
      StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
      const auto skip = [](StagedModel& of, int micro_batch) {
        of.module->skip = micro_batch % 2 == 0 ? 1 : -1;
      };
      for (int step = 0; step < 3; ++step) {
        const auto input = inputs(world, step, model.options.width);
        {
          StepScope scope(model.handle, {.reshard = reshard, .schedule = "in turn", .stages = 2});
          EXPECT_TRUE(scope.records());
          SlotRunner runner(model, scope, input);
          for (const auto& slot : slots_of(kOneForwardOneBackward)) {
            skip(model, slot.micro_batch);
            runner.run(slot);
          }
          scope.reduce(1);
          scope.reduce(0);
          scope.finish();
        }
        run_loop(loop, kMicroBatches, [&](int micro_batch) {
          skip(loop, micro_batch);
          return input(micro_batch);
        });
        expect_same_and_clear(model, loop);
      }
    });
  }
}

/// Two results, each of a unit of its own.
class TwoResults : public torch::nn::Module {
 public:
  explicit TwoResults(const Mesh& mesh) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      auto scale = std::make_shared<Scale>(seeded(40 + i, {6}));
      units.push_back(register_module(concat("unit", i), std::make_shared<Sharded<Scale>>(
                                                             fully_shard(std::move(scale), mesh))));
    }
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {units[0]->forward(x), units[1]->forward(x)};
  }
  std::vector<std::shared_ptr<Sharded<Scale>>> units;
};

// Ranks may use other results; what no rank's backward went through at first fails by name.
TEST(StepScopes, ABackwardThroughLessIsRightAndThroughMoreIsNamed) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    const auto errors = errors_of(3, [reshard](World& world) {
      const auto mesh = data_mesh(world);
      auto handle = fully_shard(std::make_shared<TwoResults>(mesh), mesh);
      auto loop = fully_shard(std::make_shared<TwoResults>(mesh), mesh);
      const auto loss = [&](auto& of, int k, bool first, bool second) {
        const auto x = input_of(world.rank(), k, 6);
        const auto [one, other] = of.forward(x);
        return (first ? squares(one) : here(at::zeros({}))) +
               (second ? squares(other) : here(at::zeros({})));
      };
      const auto step = [&](bool first, bool second) {
        StepScope scope(handle, {.reshard = reshard, .schedule = "two"});
        for (int k = 0; k < 2; ++k) {
          scope.begin_forward(0, k);
          const auto value = loss(handle, k, first, second);
          scope.begin_backward(0, k);
          backward(value);
        }
        scope.reshard(0);
        scope.reduce(0);
        scope.finish();
      };
      const auto both = [&](bool first, bool second) {
        handle.zero_grad();
        loop.zero_grad();
        step(first, second);
        for (int k = 0; k < 2; ++k) {
          loop.set_requires_gradient_sync(k == 1);
          backward(loss(loop, k, first, second));
        }
        expect_same(whole_gradients(handle), whole_gradients(loop));
      };
      const bool is_first = world.rank() == 0;
      both(is_first, true);  // rank 0 alone uses the first result
      both(is_first, !is_first);
      both(true, true);  // more than this rank had, but not more than any
      handle.zero_grad();
      {
        // Another schedule, in which the first result is not used at first.
        const auto only_second = [&](bool first) {
          StepScope scope(handle, {.reshard = reshard, .schedule = "second"});
          scope.begin_forward(0, 0);
          const auto value = loss(handle, 0, first, true);
          scope.begin_backward(0, 0);
          backward(value);
          scope.finish();
        };
        only_second(false);
        only_second(world.rank() == 1);
      }
    });
    EXPECT_THAT(errors, Each(Says("rank 1", "unit unit0", "stage 0, micro-batch 0")));
  }
}

// Naive: the gradient of all logits is held until the weights' turn.
TEST_ON_RANKS(StepScopes, AHeadFormsItsGradientAtOnce, 1) {
  StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
  model.module->pieces[3]->linear->form_weight_gradient_at_once();
  StepScope scope(model.handle, {.schedule = "head", .stages = 2});
  SlotRunner runner(model, scope, inputs(world, 0, model.options.width));
  for (const auto& slot : slots_of("F0.0 F1.0 I1.0")) runner.run(slot);
  EXPECT_EQ(model.runtime().sink().open_tickets(), 1U);  // of the other piece
  for (const auto& slot : slots_of("I0.0 W1.0 W0.0")) runner.run(slot);
  scope.finish();
  run_loop(loop, 1, inputs(world, 0, model.options.width));
  expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
}

// A record belongs to one schedule; another number of micro-batches is another schedule.
TEST_ON_RANKS(StepScopes, SchedulesInTurnAreRecordedOnceEach, 2) {
  StagedModel model(data_mesh(world), {});
  const auto records = [&](const std::string& schedule) {
    StepScope scope(model.handle, {.schedule = schedule, .stages = 2});
    const bool result = scope.records();
    SlotRunner runner(model, scope, inputs(world, 0, model.options.width));
    for (const auto& slot : slots_of("F0.0 F1.0 B1.0 B0.0")) runner.run(slot);
    scope.finish();
    return result;
  };
  EXPECT_TRUE(records("one"));
  EXPECT_TRUE(records("two"));
  EXPECT_FALSE(records("one"));
  EXPECT_FALSE(records("two"));
  // Naive: with the sixteenth name all are forgotten, those in use with those that come once.
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(records(concat("step ", i)));
    EXPECT_FALSE(records("one")) << i;
  }
  EXPECT_FALSE(records("two"));
}

// Naive: a gather at each forward, a reduction at each backward.
TEST(StepScopes, AUnitIsGatheredAndReducedOnceAStep) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    ranks(2).run([reshard](World& world) {
      StagedModel model(data_mesh(world), {});
      constexpr int kUnits = 5;  // four pieces and the root
      for (int step = 0; step < 3; ++step) {
        const auto gathers = model.runtime().gathers_issued();
        const auto reductions = model.runtime().reductions_issued();
        run_step(model, slots_of(kOneForwardOneBackward), {.reshard = reshard, .schedule = "1F1B"},
                 inputs(world, step, model.options.width));
        // A piece is gathered for each forward and each backward; the root, which stays, once.
        const int expected =
            reshard == StepReshard::kStep ? kUnits : 1 + (kUnits - 1) * 2 * kMicroBatches;
        EXPECT_EQ(model.runtime().gathers_issued() - gathers, expected) << step;
        EXPECT_EQ(model.runtime().reductions_issued() - reductions, kUnits) << step;
        for (const auto* unit : model.runtime().units()) EXPECT_FALSE(unit->gathered()) << step;
        model.handle.zero_grad();
      }
    });
  }
}

// Naive: a stage waits for the gradients that another one has deferred.
TEST_ON_RANKS(StepScopes, AStageIsReducedAndReshardedWhileAnotherOneHasPendingGradients, 2) {
  StagedModel model(data_mesh(world), {});
  for (int step = 0; step < 2; ++step) {
    StepScope scope(model.handle, {.schedule = "one stage first", .stages = 2});
    SlotRunner runner(model, scope, inputs(world, step, model.options.width));
    for (const auto& slot : slots_of("F0.0 F1.0 I1.0 I0.0 W1.0")) runner.run(slot);
    const auto before = model.runtime().reductions_issued();
    scope.reshard(1);
    scope.reduce(1);
    // The root is both stages'.
    EXPECT_EQ(model.runtime().reductions_issued() - before, 2);
    EXPECT_TRUE(model.module->handles[0]->unit()->gathered());
    EXPECT_FALSE(model.module->handles[3]->unit()->gathered());
    EXPECT_TRUE(model.handle.unit()->gathered());
    runner.run({'W', 0, 0});
    scope.reshard(0);
    scope.reduce(0);
    EXPECT_EQ(model.runtime().reductions_issued() - before, 5);
    EXPECT_FALSE(model.handle.unit()->gathered());
    scope.finish();
    model.handle.zero_grad();
  }
}

// Naive: a rank that has nothing to differentiate in its first stage leaves out what others wait
// for.
TEST(StepScopes, AStageThatTrainsNothingHasItsBackwardsAllTheSame) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    for (const int count : {1, 2}) {
      ranks(count).run([reshard](World& world) {
        const StagedOptions staged{.frozen = 0, .freezes_scale = true};
        StagedModel model(data_mesh(world), staged), loop(data_mesh(world), staged);
        for (int step = 0; step < 3; ++step) {
          const auto input = inputs(world, step, staged.width);
          run_step(model, slots_of(kZeroBubble), {.reshard = reshard, .schedule = "front"}, input);
          run_loop(loop, kMicroBatches, input);
          const auto expected = whole_gradients(loop.handle);
          EXPECT_EQ(expected.size(), 6U);
          expect_same(whole_gradients(model.handle), expected);
          model.handle.zero_grad();
          loop.handle.zero_grad();
        }
      });
    }
  }
}

// Naive: what stays gathered from one step to the next is the weights of before the optimizer.
TEST(StepScopes, UnitsThatOutlastBackwardsFollowTheOptimizer) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    ranks(2).run([reshard](World& world) {
      StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
      for (auto* each : {&model, &loop}) {
        each->handle.set_reshard_after_forward(false);
        each->handle.set_reshard_after_backward(false);
      }
      const auto optimizer = make_sgd(model.handle, sgd(0.05));
      const auto loop_optimizer = make_sgd(loop.handle, sgd(0.05));
      for (int step = 0; step < 3; ++step) {
        const auto input = inputs(world, step, model.options.width);
        run_step(model, slots_of(kZeroBubble), {.reshard = reshard, .schedule = "kept"}, input);
        run_loop(loop, kMicroBatches, input);
        expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
        EXPECT_TRUE(model.module->handles[0]->unit()->gathered());
        optimizer->step();
        loop_optimizer->step();
        model.handle.zero_grad();
        loop.handle.zero_grad();
      }
    });
  }
}

// Forward only: nothing is shown, and what comes after is right.
TEST_ON_RANKS(StepScopes, AScopeOfForwardsAloneShowsNothing, 2) {
  StagedModel model(data_mesh(world), {});
  StagedModel loop(data_mesh(world), {});
  const auto input = inputs(world, 0, model.options.width);
  for (int step = 0; step < 2; ++step) {
    {
      const at::NoGradGuard no_grad;
      StepScope scope(model.handle, {.schedule = "forward", .stages = 2});
      EXPECT_EQ(scope.records(), step == 0);
      at::Tensor x = input(0);
      for (int stage = 0; stage < 2; ++stage) {
        scope.begin_forward(stage, 0);
        x = model.handle.call(&Staged::run, stage, x);
        scope.reshard(stage);
      }
      scope.finish();
      EXPECT_TRUE(same_bits(x, loop.handle.forward(input(0))));
    }
    EXPECT_FALSE(model.handle.shards()[0].shard.grad().defined());
    run_step(model, slots_of(kZeroBubble), {.schedule = "train"}, input);
    run_loop(loop, kMicroBatches, input);
    expect_same_and_clear(model, loop);
  }
}

// Gradients that stand are added to, also what a loop without a scope has left.
TEST(StepScopes, GradientsThatStandAreAddedTo) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      StagedModel model(data_mesh(world), {});
      StagedModel loop(data_mesh(world), {});
      for (int step = 0; step < 3; ++step) {
        const auto input = inputs(world, step, model.options.width);
        if (step == 1) {
          run_loop(model, kMicroBatches, input);
        } else {
          run_step(model, slots_of(kZeroBubble), {.schedule = "train"}, input);
        }
        run_loop(loop, kMicroBatches, input);
        expect_same(whole_gradients(model.handle), whole_gradients(loop.handle),
                    concat("step ", step));
      }
    });
  }
}

TEST_ON_RANKS(StepScopes, TwoModelsInOneStep, 2) {
  StagedModel one(data_mesh(world), {}), other(data_mesh(world), {.pieces = 1});
  StagedModel loop(data_mesh(world), {}), other_loop(data_mesh(world), {.pieces = 1});
  for (int step = 0; step < 2; ++step) {
    const auto input = inputs(world, step, one.options.width);
    {
      StepScope first(one.handle, {.schedule = "a", .stages = 2});
      StepScope second(other.handle, {.schedule = "b", .stages = 2});
      SlotRunner runner(one, first, input);
      SlotRunner other_runner(other, second, input);
      for (const auto& slot : slots_of(kZeroBubble)) {
        runner.run(slot);
        other_runner.run(slot);
      }
      second.finish();
      first.finish();
    }
    run_loop(loop, kMicroBatches, input);
    run_loop(other_loop, kMicroBatches, input);
    expect_same(whole_gradients(one.handle), whole_gradients(loop.handle));
    expect_same(whole_gradients(other.handle), whole_gradients(other_loop.handle));
    for (auto* each : {&one, &other, &loop, &other_loop}) each->handle.zero_grad();
  }
}

// Handles inside the root may be a stage by themselves, several in one forward.
TEST(StepScopes, InnerHandlesOfOneRootAreAStage) {
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    ranks(2).run([reshard](World& world) {
      StagedModel model(data_mesh(world), {}), loop(data_mesh(world), {});
      const auto chain = [](StagedModel& of, at::Tensor x) {
        for (const auto& handle : of.module->handles) x = handle->forward(x);
        return squares(x);
      };
      for (int step = 0; step < 3; ++step) {
        const auto input = inputs(world, step, model.options.width);
        {
          StepScope scope(model.handle, {.reshard = reshard, .schedule = "inner"});
          std::vector<at::Tensor> losses;
          for (int k = 0; k < 3; ++k) {
            scope.begin_forward(0, k);
            losses.push_back(chain(model, input(k)));
          }
          for (int k = 0; k < 3; ++k) {
            scope.begin_backward(0, k);
            backward(std::exchange(losses[static_cast<std::size_t>(k)], at::Tensor()));
          }
          scope.finish();
        }
        for (int k = 0; k < 3; ++k) {
          loop.handle.set_requires_gradient_sync(k == 2);
          backward(chain(loop, input(k)));
        }
        expect_same_and_clear(model, loop, concat("step ", step));
      }
    });
  }
}

}  // namespace
}  // namespace tessera::test::step_scope_test
