// A step scope does what its plan says: for all choices of what is kept, gathered ahead and reduced
// when, gradients have the bits of the loop over micro-batches, and what is issued is what the plan
// has counted.

#include <numeric>
#include <random>

#include "dist/data_layout.h"
#include "dist/staged.h"
#include "fsdp/agreed/step_plan_check.h"
#include "fsdp/handle.h"
#include "proof.h"
#include "support/test.h"
#include "tessera/log_level.h"

namespace tessera::test::step_plan_run_test {
namespace {

using fsdp::Keep;
using fsdp::MicroBatchClass;
using fsdp::PlanAction;
using fsdp::PlanChoices;
using fsdp::PlanOrder;
using fsdp::PlanUnit;
using fsdp::ReduceAt;
using fsdp::StepPlan;
using fsdp::StepRecord;

/// Runs one after the other, without asking for a reduction.
void run_in_order(StagedModel& model, int micro_batches, bool sync_every,
                  const SlotRunner::InputOf& input, StepReshard reshard = StepReshard::kStep) {
  StepScope scope(model.handle, {.reshard = reshard,
                                 .sync_every_micro_batch = sync_every,
                                 .schedule = concat(micro_batches, sync_every),
                                 .micro_batches = micro_batches});
  SlotRunner runner(model, scope, input);
  for (int k = 0; k < micro_batches; ++k) {
    runner.run({'F', 0, k});
    runner.run({'B', 0, k});
  }
  scope.finish();
}

std::int64_t count(const StepPlan& plan, PlanAction::Kind kind, int micro_batches) {
  std::int64_t sum = 0;
  for (int k = 0; k < micro_batches; ++k) {
    const auto& [forward, backward] = plan.stages[0].of(fsdp::class_of(k, micro_batches));
    for (const auto* pass : {&forward, &backward}) {
      sum += std::ranges::count(pass->actions, kind, &PlanAction::kind);
    }
  }
  return sum;
}

/// Draws what is chosen, the same on every rank; remembers the last plan.
struct DrawnPlanner {
  unsigned seed;
  std::shared_ptr<StepPlan> last = std::make_shared<StepPlan>();
  StepPlan operator()(const StepRecord& record, const std::vector<PlanUnit>& units,
                      const PlanChoices& eager, PlanOrder order) const {
    std::mt19937 engine(seed);
    const auto below = [&](unsigned count) { return engine() % count; };
    auto choices = eager;
    constexpr std::array kKeeps{Keep::kNot, Keep::kUpdate, Keep::kBackward};
    for (auto& keep : choices.keep) keep = kKeeps.at(below(order == PlanOrder::kAny ? 2 : 3));
    choices.ahead_in_forward = below(4);
    choices.ahead_in_backward = below(4);
    const auto may = may_be_recomputed(record, units);
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (may[i]) choices.recompute[i] = static_cast<RecomputeMode>(below(3));
    }
    *last = fsdp::make_plan(record, units, choices, order);
    return *last;
  }
};

const std::vector<DataLayout> kLayouts{{1, 1}, {2, 1}, {3, 1},
                                       {2, 2}, {4, 2}, {2, 1, ThreadBackend::kGloo}};

class StepPlanRuns : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Grid, StepPlanRuns, ::testing::ValuesIn(kLayouts));

/// Seeds below `end`: in ./test every fourth, from another one on for each layout.
std::vector<unsigned> seeds_of(const DataLayout& layout, unsigned end) {
  std::vector<unsigned> seeds(end);
  std::iota(seeds.begin(), seeds.end(), 0U);
  return in_turn(seeds, 4, kLayouts, layout);
}

// Naive: a reduction before all micro-batches are summed, or two of one sum.
TEST_P_ON_RANKS(StepPlanRuns, MicroBatchesInOrderGiveTheBitsOfTheLoop, GetParam()) {
  constexpr std::uint32_t kSeed = 2;
  const std::vector<StagedOptions> all{{.stages = 1, .pieces = 3},
                                       {.stages = 1, .mode = RecomputeMode::kFull},
                                       {.stages = 1, .recomputes_outside = true},
                                       {.stages = 1, .freezes_scale = true}};
  const auto choices = cases({all.size(), 2, 2}, [](const Choice&) { return true; }, kSeed);
  for (const Choice& choice : in_turn(choices, 2, kLayouts, GetParam())) {
    const StagedOptions& staged = all[choice[0]];
    const auto reshard = choice[1] == 0 ? StepReshard::kStep : StepReshard::kMicroBatch;
    const bool sync_every = choice[2] == 1;
    SCOPED_TRACE(::testing::PrintToString(choice));
    const auto mesh = data_mesh(world, GetParam().replicas);
    // In fp32 a sum tells in which order it was added.
    const auto policy = sync_every ? PrecisionPolicy{} : in_bfloat16();
    StagedModel model(mesh, staged, policy);
    StagedModel loop(mesh, staged, policy);
    for (const int micro_batches : {3, 1, 3, 3, 2, 1}) {
      const auto input = inputs(world, micro_batches, staged.width);
      run_in_order(model, micro_batches, sync_every, input, reshard);
      run_loop(loop, micro_batches, input, sync_every);
      expect_same_and_clear(model, loop, concat(micro_batches, " micro-batches"));
    }
  }
}

// For all choices of a planner: the same bits, and as many gathers and reductions as its plan has.
TEST_P_ON_RANKS(StepPlanRuns, ForAnyChoiceTheBitsAreTheSame, GetParam()) {
  const auto& layout = GetParam();
  const StagedOptions staged{.stages = 1, .pieces = 4};
  const auto mesh = data_mesh(world, layout.replicas);
  StagedModel model(mesh, staged, in_bfloat16());
  StagedModel loop(mesh, staged, in_bfloat16());
  const auto optimizer = make_sgd(model.handle, sgd(0.05));
  const auto loop_optimizer = make_sgd(loop.handle, sgd(0.05));
  constexpr int kMicroBatches = 3;
  for (const unsigned seed : seeds_of(layout, 24)) {
    SCOPED_TRACE(concat("seed ", seed));
    const DrawnPlanner planner{seed};
    fsdp::set_planner(model.handle, planner);
    const bool sync_every = seed % 3 == 0;
    for (int step = 0; step < 3; ++step) {
      const auto input = inputs(world, step, staged.width);
      auto& runtime = model.runtime();
      const auto gathers = runtime.gathers_issued();
      const auto reductions = runtime.reductions_issued();
      run_in_order(model, kMicroBatches, sync_every, input);
      if (!planner.last->stages.empty()) {
        EXPECT_TRUE(fsdp::faults_of(*planner.last).empty());
        EXPECT_EQ(runtime.gathers_issued() - gathers,
                  count(*planner.last, PlanAction::Kind::kGather, kMicroBatches));
        if (layout.ranks > layout.replicas) {
          EXPECT_EQ(runtime.reductions_issued() - reductions,
                    count(*planner.last, PlanAction::Kind::kReduce, kMicroBatches));
        }
      }
      run_loop(loop, kMicroBatches, input, sync_every);
      expect_same(whole_gradients(model.handle), whole_gradients(loop.handle),
                  concat("step ", step));
      for (auto* one : {optimizer.get(), loop_optimizer.get()}) one->step();
      model.handle.zero_grad();
      loop.handle.zero_grad();
    }
    EXPECT_FALSE(planner.last->stages.empty());
  }
}

/// Throws, or returns an invalid plan, as a planner may.
StepPlan refused_plan(unsigned which) {
  if (which == 0) {
    throw Error(ErrorKind::kConfig, "compile.memory_budget: found 1, expected at least 512");
  }
  if (which == 1) throw std::runtime_error("the user's planner went wrong");
  return {};
}

// Naive: it aborts the World for all ranks, though nothing has begun, and the sums of the steps
// before are lost. A budget that only some ranks refuse is refused by all.
TEST_P(StepPlanRuns, APlanThatIsRefusedLeavesEverythingAsItIs) {
  const auto& layout = GetParam();
  constexpr const char* kSaid[] = {"found 1, expected at least 512", "the user's planner",
                                   "plan of a step: found"};
  ranks(layout).run([&](World& world) {
    const StagedOptions staged{.stages = 1, .pieces = 3};
    StagedModel model(data_mesh(world, layout.replicas), staged, in_bfloat16());
    StagedModel loop(data_mesh(world, layout.replicas), staged, in_bfloat16());
    std::mt19937 draw(41);
    for (int i = 0; i < 9; ++i) {
      run_in_order(model, 2, false, inputs(world, i));
      run_loop(loop, 2, inputs(world, i));
      const auto which = static_cast<unsigned>(draw() % 3);
      const auto refusers = 1 + draw() % ((1U << layout.ranks) - 1);  // a bit each
      fsdp::set_planner(model.handle, [&](const auto& record, const auto& units, const auto& eager,
                                          PlanOrder order) {
        return (refusers >> world.rank() & 1U) != 0 ? refused_plan(which)
                                                    : fsdp::make_plan(record, units, eager, order);
      });
      const auto error = thrown_by([&] { run_in_order(model, 2, false, inputs(world, i)); });
      EXPECT_THAT(error, Says(kSaid[which])) << "rank " << world.rank() << " of " << refusers;
      EXPECT_FALSE(world.aborted());
      expect_same(whole_gradients(model.handle), whole_gradients(loop.handle), concat("case ", i));
      fsdp::set_planner(model.handle, DrawnPlanner{static_cast<unsigned>(i)});
      model.handle.zero_grad();
      loop.handle.zero_grad();
    }
  });
}

// Modules of units follow the plan during its step; in a step that records they follow what was set
// then; and a user's setting is never changed.
TEST_ON_RANKS(RecomputeByPlan, ModulesAreToldAsLongAsTheStepLasts, 2) {
  StagedModel model(data_mesh(world), {.stages = 1, .pieces = 4});
  auto& pieces = model.module->pieces;
  pieces[3]->set_recompute(RecomputeMode::kSelective);
  std::vector<RecomputeMode> seen(4);
  for (std::size_t i = 0; i < 4; ++i) {
    pieces[i]->before = [&seen, i, piece = pieces[i].get()] { seen[i] = piece->recompute(); };
  }
  const auto planner = [](const StepRecord& record, const std::vector<PlanUnit>& units,
                          const PlanChoices& eager, PlanOrder order) {
    auto choices = eager;
    choices.recompute[2] = RecomputeMode::kFull;
    choices.recompute[3] = RecomputeMode::kSelective;
    return fsdp::make_plan(record, units, choices, order);
  };
  fsdp::set_planner(model.handle, planner, RecomputeMode::kFull);
  const auto step = [&] {
    run_in_order(model, 2, false, inputs(world));
    model.handle.zero_grad();
    for (const auto& piece : pieces) {
      EXPECT_EQ(piece->recompute(), piece->own_recompute().value_or(RecomputeMode::kNone));
    }
  };
  using enum RecomputeMode;
  step();
  EXPECT_THAT(seen, ElementsAre(kFull, kFull, kFull, kSelective));
  step();
  EXPECT_THAT(seen, ElementsAre(kNone, kFull, kSelective, kSelective));
  EXPECT_THAT(fsdp::followed_recompute(model.handle),
              ElementsAre(kNone, kNone, kFull, kSelective, kSelective));
  // Other inputs of the plan than those of the last step.
  pieces[1]->set_recompute(kNone);
  const auto of = fsdp::plan_units(model.handle);
  EXPECT_EQ(of[0].recompute_by, fsdp::RecomputeBy::kNone);
  EXPECT_EQ(of[1].recompute_by, fsdp::RecomputeBy::kPlan);
  EXPECT_EQ(of[2].recompute_by, fsdp::RecomputeBy::kUser);
  step();
  EXPECT_EQ(seen[1], kNone);
  fsdp::set_planner(model.handle, {});
  step();
  EXPECT_THAT(seen, ElementsAre(kNone, kNone, kNone, kSelective));
}

// The same where a pipeline's order has two stages, and one unit is of both.
TEST_P(StepPlanRuns, ForAnyChoiceInAnyOrderTheBitsAreTheSame) {
  const auto& layout = GetParam();
  constexpr const char* kList =
      "F0.0 F0.1 F1.0 I1.0 F0.2 I0.0 F1.1 I1.1 W1.0 I0.1 F1.2 I1.2 W0.0 W1.1 I0.2 W0.1 W1.2 W0.2";
  ranks(layout).run([&](World& world) {
    const StagedOptions staged{.stages = 2, .pieces = 2};
    const auto mesh = data_mesh(world, layout.replicas);
    StagedModel model(mesh, staged, in_bfloat16());
    StagedModel loop(mesh, staged, in_bfloat16());
    for (const unsigned seed : seeds_of(layout, 12)) {
      fsdp::set_planner(model.handle, DrawnPlanner{seed});
      for (int step = 0; step < 2; ++step) {
        const auto input = inputs(world, step, staged.width);
        run_step(model, slots_of(kList), {.schedule = kList}, input);
        run_loop(loop, 3, input);
        expect_same_and_clear(model, loop, concat("seed ", seed, ", step ", step));
      }
    }
  });
}

// Naive: the first stage's list reshards what it found gathered, though it never comes to it.
TEST_P(StepPlanRuns, WhatIsUnshardedBeforeTheStepIsThereWhereItIsUsed) {
  const auto& layout = GetParam();
  constexpr const char* kList = "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1";
  ranks(layout).run([&](World& world) {
    for (const bool ties : {false, true}) {
      const StagedOptions staged{.stages = 2, .pieces = 2, .ties = ties};
      const auto mesh = data_mesh(world, layout.replicas);
      StagedModel model(mesh, staged, in_bfloat16());
      StagedModel loop(mesh, staged, in_bfloat16());
      for (int step = 0; step < 4; ++step) {
        // Unshards a unit of the second stage, of the first one, of both.
        if (step == 1) model.module->handles[2]->unshard();
        if (step == 2) model.module->handles[0]->unshard();
        if (step == 3) model.handle.unshard();
        const auto input = inputs(world, step, staged.width);
        run_step(model, slots_of(kList), {.reshard = StepReshard::kMicroBatch, .schedule = kList},
                 input);
        run_loop(loop, 2, input);
        expect_same_and_clear(model, loop, concat("step ", step));
      }
    }
  });
}

// ---------------------------------------------------------------------------------- what is
// refused

/// Returns what a second step says after `change` of its plan, on each of two ranks.
std::vector<std::string> refused(const std::function<void(StepPlan&, int rank)>& change) {
  std::vector<std::string> errors(2);
  ranks(2).run([&](World& world) {
    StagedModel model(data_mesh(world), {.stages = 1});
    fsdp::set_planner(model.handle, [&](const StepRecord& record, const auto& units,
                                        const PlanChoices& eager, PlanOrder order) {
      auto plan = fsdp::make_plan(record, units, eager, order);
      change(plan, world.rank());
      return plan;
    });
    run_in_order(model, 2, false, inputs(world));
    model.handle.zero_grad();
    errors[static_cast<std::size_t>(world.rank())] =
        thrown_by([&] { run_in_order(model, 2, false, inputs(world)); });
  });
  return errors;
}

// Seeded faults: a missing wait, a gather or release too many, a reduction too early. None runs.
TEST(StepPlanErrors, AFaultyPlanIsRefusedBeforeTheStep) {
  const auto erased = [](PlanAction::Kind kind) {
    return [kind](StepPlan& plan, int) {
      auto& actions = plan.stages[0].micro_batches[1].forward.actions;
      const auto found = std::ranges::find(actions, kind, &PlanAction::kind);
      ASSERT_NE(found, actions.end());
      actions.erase(found);
      for (auto& place : plan.stages[0].micro_batches[1].forward.places[0]) {
        const auto at = static_cast<std::size_t>(found - actions.begin());
        for (auto* end : {&place.needed, &place.ahead, &place.after}) *end -= *end > at ? 1 : 0;
      }
    };
  };
  const auto expect = [](const std::vector<std::string>& errors, const auto& matcher) {
    for (const auto& error : errors) EXPECT_THAT(error, AllOf(Says("plan of a step"), matcher));
  };
  expect(refused(erased(PlanAction::Kind::kWait)), Says("before the wait for its gather"));
  expect(refused(erased(PlanAction::Kind::kGather)), Says("micro-batch first, forward"));
  expect(refused([](StepPlan& plan, int) {
           // The layer before is reduced where the last one's backward ends.
           auto& actions = plan.stages[0].micro_batches[3].backward.actions;
           ASSERT_EQ(actions.at(0).kind, PlanAction::Kind::kReduce);
           std::swap(actions[0], actions[1]);
         }),
         Says("micro-batch last, backward"));
  expect(refused([](StepPlan& plan, int) { plan.record.stages[0].reached[0].back() = false; }),
         Says("another trace"));
  expect(refused([](StepPlan& plan, int) { plan.units[1].bytes += 1; }), Says("other units"));
}

TEST(StepPlanErrors, RanksWithOtherPlansAreToldApart) {
  const auto errors = refused([](StepPlan& plan, int rank) {
    if (rank == 0) return;
    auto choices = plan.choices;
    for (auto& keep : choices.keep) keep = Keep::kNot;
    plan = fsdp::make_plan(plan.record, plan.units, choices, plan.order);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, Says("plans of a step differ between ranks", "rank 0 has micro-batch only",
                            "rank 1 has"));
  }
}

// A rank that would keep products where another one keeps nothing: its plan has the same actions.
TEST(StepPlanErrors, RanksThatRecomputeInOtherModesAreToldApart) {
  const auto errors = refused([](StepPlan& plan, int rank) {
    auto choices = plan.choices;
    choices.recompute[1] = rank == 0 ? RecomputeMode::kFull : RecomputeMode::kSelective;
    plan = fsdp::make_plan(plan.record, plan.units, choices, plan.order);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error,
                Says("plans of a step differ between ranks", "recompute piece0 wholly, rank 1 has",
                     "recompute piece0 but for products of weights"));
  }
}

// One rank alone has a planner: said when the scope opens, not met as a collective that fits
// nothing.
TEST(StepPlanErrors, APlannerIsOfAllRanks) {
  std::vector<std::string> errors(2);
  ranks(2).run([&](World& world) {
    StagedModel model(data_mesh(world), {.stages = 1});
    if (world.rank() == 1) fsdp::set_planner(model.handle, DrawnPlanner{1});
    errors[static_cast<std::size_t>(world.rank())] =
        thrown_by([&] { run_in_order(model, 2, false, inputs(world)); });
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, Says("StepScope differs between ranks", "no planner"));
  }
}

struct Around : torch::nn::Module {
  explicit Around(std::shared_ptr<Sharded<Affine>> one)
      : inner(register_module("inner", std::move(one))) {}
  at::Tensor forward(const at::Tensor& x) { return inner->forward(x); }
  std::shared_ptr<Sharded<Affine>> inner;
};

// Naive: compile() has chosen a plan that no step reads, silently.
TEST_ON_RANKS(StepPlanErrors, WhatCompileIsOfNoUseForIsSaid, 2) {
  const auto mesh = data_mesh(world);
  const auto handle =
      std::make_shared<Sharded<Affine>>(fully_shard(std::make_shared<Affine>(1, 7, 13), mesh));
  fsdp::set_planner(*handle, DrawnPlanner{1});
  EXPECT_THAT(thrown_by([&] { fully_shard(std::make_shared<Around>(handle), mesh); }),
              Says("fully_shard around inner: found a module that compile() was",
                   "call compile() on the outermost module"));
  const auto said = [&] {
    set_log_level(LogLevel::kWarn);
    if (world.rank() == 0) ::testing::internal::CaptureStderr();
    backward(squares(handle->forward(input_of(0, world.rank(), 7))));
    return world.rank() == 0 ? ::testing::internal::GetCapturedStderr() : std::string();
  };
  const auto first = said(), second = said();
  if (world.rank() == 0) {
    EXPECT_THAT(first, Says("a backward outside of a StepScope"));
  }
  EXPECT_EQ(second, "") << "once is enough";
  handle->zero_grad();
  fsdp::set_planner(*handle, {});
  fully_shard(std::make_shared<Around>(handle), mesh);
}

TEST(StepPlanErrors, MicroBatchesThatAreCountedComeInOrder) {
  const auto refused_in = [](const StepScopeOptions& options, const std::string& slots,
                             const std::function<void(StepScope&)>& act) {
    std::string error;
    ranks(1).run([&](World& world) {
      StagedModel model(data_mesh(world), {.stages = 1});
      error = thrown_by([&] {
        StepScope scope(model.handle, options);
        SlotRunner runner(model, scope, inputs(world));
        for (const auto& slot : slots_of(slots)) runner.run(slot);
        act(scope);
      });
    });
    return error;
  };
  const StepScopeOptions two{.micro_batches = 2};
  EXPECT_THAT(refused_in(two, "F0.0", [](auto& scope) { scope.begin_forward(0, 1); }),
              Says("micro-batch 1 before the backward of 0"));
  EXPECT_THAT(refused_in(two, "F0.0 B0.0", [](auto& scope) { scope.finish(); }),
              Says("found 1 micro-batches, expected the 2"));
  EXPECT_THAT(
      refused_in(two, "F0.0 B0.0 F0.1 B0.1", [](auto& scope) { scope.begin_forward(0, 2); }),
      Says("micro-batch 2 after 2"));
  EXPECT_THAT(refused_in(two, "F0.0",
                         [](auto& scope) { scope.begin_backward(0, 0, Backward::kInputOnly); }),
              Says("kInputOnly"));
  EXPECT_THAT(refused_in({.stages = 2, .micro_batches = 2}, "", [](auto&) {}),
              Says("2 micro-batches of 2 stages"));
  EXPECT_THAT(refused_in({.micro_batches = 0}, "", [](auto&) {}), Says("0 micro-batches"));
}

}  // namespace
}  // namespace tessera::test::step_plan_run_test
