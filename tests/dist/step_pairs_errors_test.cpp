// Refusals of a step scope's pairs, by name, and faults put into one: each is found.
#include <ATen/Context.h>

#include <fstream>
#include <latch>
#include <thread>

#include "base/log.h"
#include "base/test_hooks.h"
#include "comm/batch.h"
#include "dist/body.h"
#include "dist/paired.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "tessera/interrupt.h"

namespace tessera::test::step_pairs_errors_test {
namespace {

using How = PairedStep::How;

/// One stage of two units, whose forward takes more turns than its backward, where it ends.
DrawnStages one_stage(RecomputeMode mode = RecomputeMode::kNone) {
  DrawnStages drawn;
  drawn.stages = {{0, 1}};
  drawn.pieces = {{.exchanges = {0, 4, 4}, .mode = mode}, {.exchanges = {4}, .mode = mode}};
  drawn.before = drawn.after = {0};
  return drawn;
}

const std::vector<PairedSlot>& pairs_of_one_stage() {
  static const std::vector<PairedSlot> slots{{'F', 0, 0},
                                             {'B', 0, 0, std::pair(0, 1)},
                                             {'I', 0, 1, std::pair(0, 2)},
                                             {'W', 0, 1},
                                             {'B', 0, 2}};
  return slots;
}

Tensors run_pairs(World& world, PairedModel& model, int step, StepScopeOptions options = {}) {
  return run_slots(world, model, pairs_of_one_stage(), How::kAsPairs, options, step);
}

/// `model` as pairs has the bits of another one in turn.
void expect_right_steps(World& world, PairedModel& model, StepScopeOptions options = {}) {
  PairedModel other(world, model.drawn);
  model.handle.zero_grad();
  for (int step = 0; step < 3; ++step) {
    model.sites().restart();
    expect_same(run_pairs(world, model, step, options),
                run_slots(world, other, pairs_of_one_stage(), How::kInTurn, options, step),
                concat("step ", step));
  }
}

// --- faults ---

/// The errors of two ranks in a third step, before which `plant` has changed rank 1.
std::vector<std::string> errors_of_fault(const DrawnStages& drawn,
                                         const std::function<void(PairedModel&)>& plant) {
  std::vector<std::string> errors(2);
  RankBarrier meeting(2);
  ranks(2).run([&](World& world) {
    RankBarrier::Seat seat(meeting);
    PairedModel model(world, drawn);
    for (int step = 0; step < 2; ++step) run_pairs(world, model, step);
    if (world.rank() == 1) plant(model);
    errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] { run_pairs(world, model, 2); });
    seat.wait();
    world.recover();
    model.exchanges->axis.gives_turn = true;
    for (const auto& piece : model.module->pieces) piece->at_end = {};
    expect_right_steps(world, model);
  });
  return errors;
}

// Naive: ranks that continue in other orders, and hang or add each other's rows later.
TEST(StepPairFaults, ATurnMoreOrLessThanInTheFirstStepIsNamed) {
  const auto says = [](const char* found) {
    return Each(Says("rank 1", "the forward of stage 0, micro-batch 1", found, "expected 4"));
  };
  // Where the other pass has ended nothing else tells.
  EXPECT_THAT(errors_of_fault(one_stage(),
                              [](PairedModel& model) {
                                model.module->pieces[1]->at_end = [] { comm::Turns::pass(); };
                              }),
              says("found 5 turns"));
  EXPECT_THAT(errors_of_fault(one_stage(),
                              [](PairedModel& model) {
                                model.module->pieces[0]->at_end = [&model] {
                                  if (!comm::Turns::under_way()) return;
                                  model.exchanges->axis.gives_turn = false;
                                };
                              }),
              says("found 3 turns"));
}

// Naive: rows of the one pass arrive as the other's.
TEST(StepPairFaults, ATurnMoreInTheMiddleMeetsAnotherExchangeByName) {
  auto drawn = one_stage();
  drawn.pieces = {{.exchanges = {0, 0}}, {.exchanges = {0, 0}}};
  EXPECT_THAT(
      errors_of_fault(drawn,
                      [](PairedModel& model) {
                        model.module->pieces[0]->at_end = [] { comm::Turns::pass(); };
                      }),
      all_and_one(Says("rank 0 issues all_to_all of toy", "rank 1 issues all_to_all of toy",
                       "micro-batch 0, stage 0, backward", "micro-batch 1, stage 0, forward")));
}

// The records differ: no rank may run interleaved.
TEST(StepPairFaults, RanksWithOtherNumbersOfTurnsRunInTurnAndSayItOnce) {
  const TemporaryFolder folder;
  const auto file = folder / "said.log";
  log::init({.rank = 0, .world_size = 1, .file = file});
  ranks(2).run([](World& world) {
    PairedModel model(world, one_stage()), other(world, one_stage());
    model.exchanges->axis.gives_turn = world.rank() == 0;
    for (int step = 0; step < 3; ++step) {
      expect_same(run_pairs(world, model, step),
                  run_slots(world, other, pairs_of_one_stage(), How::kInTurn, {}, step));
      for (const int count : model.sites().counts()) EXPECT_EQ(count, 0);
    }
  });
  log::init({.rank = 0, .world_size = 1, .file = {}});
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  EXPECT_THAT(lines, ElementsAre(Says("StepScope::run_pair: found that ranks have other numbers")));
}

// Naive: the forward's end takes the weights away that the backward computes with.
TEST(StepPairFaults, AUnitThatBothUseIsGatheredOnceAndStaysForTheLastOfThem) {
  for (const auto mode : {RecomputeMode::kNone, RecomputeMode::kFull}) {
    auto drawn = one_stage(mode);
    drawn.stages = {{0}};
    drawn.pieces.resize(1);
    for (const int turns_of_forward : {0, 3}) {
      drawn.pieces[0].exchanges.assign(static_cast<std::size_t>(turns_of_forward), 4);
      drawn.pieces[0].exchanges.insert(drawn.pieces[0].exchanges.begin(), {1, 0});
      for (const int count : {1, 2, 4}) {
        ranks(count).run([&](World& world) {
          PairedModel model(world, drawn);
          expect_right_steps(world, model, {.reshard = StepReshard::kMicroBatch});
        });
      }
    }
  }
}

at::Tensor turn(const at::Tensor& x) {
  static thread_local FaultSites none;
  return Passage::apply(x, c10::make_intrusive<Witness>(none, true));
}

/// Computes x (256 w), x w and x (-256 w), the weight used in this order, with a turn before the
/// last use: in bf16 the backward's sum is 0, and 1 where it is formed in two parts.
Several cancelling(Body& body, const Several& inputs) {
  const auto run = [&body](const Several& in) {
    const at::Tensor& x = in[0];
    const at::Tensor first = x * body.weight * -256.0;  // each use by itself: compilers differ
    const at::Tensor second = x * body.weight;
    const at::Tensor both = turn(first + second);
    const at::Tensor third = x * body.weight * 256.0;
    return both + third;
  };
  return {checkpoint(run, {inputs[0]})};
}

// Naive: a forward gives a unit's weights new accumulators while a backward runs a checkpoint
// inside, or the other way round.
TEST(StepPairFaults, WhatBf16AddsUpIsAddedInOneSumWhereBothAreInAUnit) {
  for (const int turns_before : {0, 1, 2}) {
    ranks(1).run([turns_before](World& world) {
      std::vector<Tensors> found;
      for (const bool as_pairs : {false, true}) {
        auto model = fully_shard(std::make_shared<Body>(cancelling), data_mesh(world),
                                 in_bfloat16(), undivided());
        for (int step = 0; step < 2; ++step) {
          model.zero_grad();
          StepScope scope(model, {.schedule = "cancelling"});
          std::map<int, at::Tensor> losses;
          const auto forward = [&](int micro_batch) {
            at::Tensor x = here(at::ones({1, Body::kWidth})).requires_grad_();
            for (int i = 0; i < turns_before; ++i) x = turn(x);
            losses[micro_batch] = model.forward({x})[0].sum();
          };
          const auto back = [&](int micro_batch) { backward(losses[micro_batch]); };
          scope.begin_forward(0, 0);
          forward(0);
          if (as_pairs) {
            scope.run_pair({0, 1, [&] { forward(1); }}, {0, 0, Backward::kFull, [&] { back(0); }});
          } else {
            scope.begin_forward(0, 1);
            forward(1);
            scope.begin_backward(0, 0);
            back(0);
          }
          scope.begin_backward(0, 1);
          back(1);
          scope.finish();
        }
        found.push_back(whole_gradients(model));
      }
      expect_same(found[1], found[0]);
      EXPECT_TRUE(found[0].at("weight").eq(0).all().item<bool>()) << found[0].at("weight");
    });
  }
}

/// While it lives tensors without values are NaN, and results are there once they are waited for.
class LateResults {
 public:
  LateResults() : late_(test_hooks::deliver_at_wait, [] { return true; }) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  ~LateResults() { at::globalContext().setDeterministicAlgorithms(false, false); }
  LateResults(const LateResults&) = delete;
  LateResults& operator=(const LateResults&) = delete;

 private:
  const test_hooks::Set<decltype(test_hooks::deliver_at_wait)> late_;
};

// Naive: rows that are read, or let go, before they are waited for: old values in a pair alone.
TEST(StepPairFaults, RowsThatAreReadBeforeTheyArriveAreFoundByBits) {
  auto drawn = one_stage();
  drawn.pieces[0].exchanges = {0, 1, 1, 0};
  const LateResults late;
  for (const bool reads_early : {false, true}) {
    ranks(2).run([&](World& world) {
      PairedModel model(world, drawn), other(world, drawn);
      model.exchanges->reads_early = reads_early;
      for (int step = 0; step < 2; ++step) {
        const auto found = run_pairs(world, model, step);
        const auto expected = run_slots(world, other, pairs_of_one_stage(), How::kInTurn, {}, step);
        if (!reads_early) expect_same(found, expected);
        EXPECT_EQ(found.at("result of 0.1").isnan().all().item<bool>(), reads_early);
      }
    });
  }
}

// --- refusals ---

using Act = std::function<void(PairedModel&, StepScope&, PairedStep&)>;

/// Returns what `act` throws after the forward of micro-batch 0, in a step that records and in one
/// that follows a record.
std::vector<std::string> refused(const Act& act, StepScopeOptions options = {}) {
  std::vector<std::string> errors;
  ranks(1).run([&](World& world) {
    for (const bool records : {true, false}) {
      PairedModel model(world, one_stage());
      options.schedule = "refused";
      if (!records) run_pairs(world, model, 0, {.schedule = options.schedule});
      {
        StepScope scope(model.handle, options);
        EXPECT_EQ(scope.records(), records);
        PairedStep step(model, scope, How::kAsPairs, 0, 1);
        step.run({'F', 0, 0});
        errors.push_back(refusal_of([&] { act(model, scope, step); }));
      }
      world.recover();
      expect_right_steps(world, model);
    }
  });
  return errors;
}

void pair(StepScope& scope, PairedStep& step, const std::function<void()>& forward = {},
          const std::function<void()>& back = {}) {
  scope.run_pair({0, 1,
                  [&] {
                    step.forward(0, 1);
                    if (forward) forward();
                  }},
                 {0, 0, Backward::kFull, [&] {
                    step.backward(0, 0);
                    if (back) back();
                  }});
}

TEST(StepPairErrors, WhatDoesNotFitTogetherIsNamed) {
  const auto of = [](int stage, int micro_batch, int stage_back, int back) {
    return refused([=](PairedModel&, StepScope& scope, PairedStep& step) {
      scope.run_pair({stage, micro_batch, [&] { step.forward(stage, micro_batch); }},
                     {stage_back, back, Backward::kFull, [&] { step.backward(stage_back, back); }});
    });
  };
  EXPECT_THAT(of(0, 1, 0, 1), Each(Says("usage: StepScope::run_pair", "stage 0, micro-batch 1",
                                        "had its forward in this step")));
  EXPECT_THAT(of(0, 1, 0, 7), Each(Says("usage: StepScope::run_pair", "stage 0, micro-batch 7",
                                        "had its forward in this step")));
  EXPECT_THAT(of(0, 0, 0, 0), Each(Says("usage: StepScope::", "micro-batch 0", "a second time")));
  EXPECT_THAT(of(1, 1, 0, 0), Each(Says("usage: StepScope::run_pair", "stage 1", "0 to 0")));
  EXPECT_THAT(of(0, 1, -1, 0), Each(Says("usage: StepScope::run_pair", "stage -1", "0 to 0")));
  EXPECT_THAT(
      refused([](auto&, auto& scope, auto& step) { pair(scope, step); }, {.micro_batches = 3}),
      Each(Says("usage: StepScope::run_pair", "StepScopeOptions::micro_batches")));
  EXPECT_THAT(refused([](auto&, auto& scope, auto& step) {
                scope.reshard(0);
                pair(scope, step);
              }),
              Each(Says("usage: StepScope::", "stage 0, micro-batch", "after reshard()")));
  EXPECT_THAT(refused([](auto&, auto& scope, auto& step) {
                scope.reduce(0);
                pair(scope, step);
              }),
              Each(Says("usage: StepScope::", "stage 0, micro-batch", "after reduce()")));
}

// A pair that is refused before it begins has left nothing: the step continues.
TEST_ON_RANKS(StepPairErrors, AStepWhosePairWasRefusedIsOpenAsBefore, 2) {
  PairedModel model(world, one_stage()), other(world, one_stage());
  for (int number = 0; number < 3; ++number) {
    Tensors found;
    {
      StepScope scope(model.handle);
      PairedStep step(model, scope, How::kAsPairs, world.rank(), number);
      for (const auto& slot : pairs_of_one_stage()) {
        EXPECT_REFUSED(kUsage, scope.run_pair({0, 3, [] {}}, {0, 3, Backward::kFull, [] {}}),
                       "micro-batch 3");
        EXPECT_REFUSED(kUsage, scope.run_pair({2, 3, [] {}}, {0, 0, Backward::kFull, [] {}}),
                       "stage 2");
        step.run(slot);
      }
      scope.finish();
      found = step.results();
    }
    found.merge(whole_gradients(model.handle));
    model.handle.zero_grad();
    expect_same(found, run_slots(world, other, pairs_of_one_stage(), How::kInTurn, {}, number));
  }
}

// Naive: the forward that has not run yet, or the backward, is taken for one that is over.
TEST(StepPairErrors, CallsOfTheScopeInsideOfAPairAreNamed) {
  const std::map<std::string, std::function<void(StepScope&)>> calls{
      {"StepScope::finish", [](auto& scope) { scope.finish(); }},
      {"StepScope::reshard", [](auto& scope) { scope.reshard(0); }},
      {"StepScope::reduce", [](auto& scope) { scope.reduce(0); }},
      {"StepScope::run_weight_gradients", [](auto& scope) { scope.run_weight_gradients(0, 0); }},
      {"StepScope::begin_forward", [](auto& scope) { scope.begin_forward(0, 2); }},
      {"StepScope::begin_backward", [](auto& scope) { scope.begin_backward(0, 1); }},
      {"StepScope::run_pair",
       [](auto& scope) { scope.run_pair({0, 2, [] {}}, {0, 1, Backward::kFull, [] {}}); }},
  };
  for (const auto& [name, call] : calls) {
    for (const bool of_forward : {true, false}) {
      EXPECT_THAT(refused([&](auto&, auto& scope, auto& step) {
                    const auto inside = [&] { call(scope); };
                    if (of_forward) {
                      pair(scope, step, inside);
                    } else {
                      pair(scope, step, {}, inside);
                    }
                  }),
                  Each(Says(concat("usage: ", name,
                                   ": found a call inside of a function of "
                                   "StepScope::run_pair()"))));
    }
  }
}

TEST(StepPairErrors, AForwardInTheFunctionOfABackwardIsNamed) {
  const auto call = [](PairedModel& model) {
    model.handle.call(&PairedStages::run, 0, here(at::ones({4, 6})));
  };
  EXPECT_THAT(refused([&](auto& model, auto& scope, auto& step) {
                pair(scope, step, {}, [&] { call(model); });
              }),
              Each(Says("usage: ", "forward")));
  EXPECT_THAT(refused([&](auto& model, auto& scope, auto& step) {
                scope.run_pair({0, 1, [&] { step.forward(0, 1); }},
                               {0, 0, Backward::kFull, [&] { call(model); }});
              }),
              Each(Says("usage: ", "forward")));
}

// The engine's queue of a thread is one: a second backward in it would run the first one's nodes.
TEST(StepPairErrors, ABackwardInTheFunctionOfAForwardIsNamed) {
  const auto through = [](PairedModel& model, const at::Tensor& x) {
    const at::Tensor y = model.handle.call(&PairedStages::run, 0, x);
    torch::autograd::grad({squares(y)}, {x});
  };
  EXPECT_THAT(refused([&](auto& model, auto& scope, auto& step) {
                const at::Tensor x = here(at::ones({4, 6})).requires_grad_();
                scope.run_pair({0, 1, [&] { through(model, x); }},
                               {0, 0, Backward::kFull, [&] { step.backward(0, 0); }});
              }),
              Each(Says("usage: ")));
}

// --- errors ---

// A failed step stays failed until recover(), for all calls.
TEST(StepPairErrors, AfterAnErrorTheScopeSaysThatTheStepHasFailed) {
  for (const bool before_second : {true, false}) {
    const auto errors = refused([&](auto&, auto& scope, auto& step) {
      const auto fails = [] { throw std::runtime_error("planted fault"); };
      EXPECT_EQ(thrown_by([&] {
                  scope.run_pair({0, 1,
                                  [&] {
                                    if (before_second) fails();
                                    step.forward(0, 1);
                                    fails();
                                  }},
                                 {0, 0, Backward::kFull, [&] { step.backward(0, 0); }});
                }),
                "planted fault");
      EXPECT_REFUSED(kComm, scope.reduce(0), "a step that has failed");
      EXPECT_REFUSED(kComm, pair(scope, step), "a step that has failed");
      scope.finish();
    });
    EXPECT_THAT(errors, Each(Says("comm: StepScope::finish", "a step that has failed")));
  }
}

// Naive: the other pass stays suspended, and the other rank waits.
TEST(StepPairErrors, AnInterruptOfAWaitEndsBothPassesOnBothRanks) {
  struct Interrupt : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  static thread_local bool may_interrupt = false;
  set_interrupt_check([] {
    if (may_interrupt) throw Interrupt("enough");
  });
  std::latch interrupted(1);
  std::atomic<bool> holds = false;
  const test_hooks::Set held(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    const bool is_toy = batch.label.unit == "toy";
    if (rank == 1 && is_toy && comm::Turns::under_way() && holds.exchange(false)) {
      interrupted.wait();
    }
  });
  std::vector<std::string> errors(2);
  RankBarrier meeting(2);
  ranks(2).run([&](World& world) {
    RankBarrier::Seat seat(meeting);
    PairedModel model(world, one_stage(RecomputeMode::kFull));
    for (int step = 0; step < 2; ++step) run_pairs(world, model, step);
    seat.wait();
    may_interrupt = world.rank() == 0;
    if (may_interrupt) holds = true;
    seat.wait();
    errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] {
      if (world.rank() == 0) {
        EXPECT_THROW(run_pairs(world, model, 2), Interrupt);
        may_interrupt = false;
        interrupted.count_down();
        throw std::runtime_error("interrupted here");
      }
      run_pairs(world, model, 2);
    });
    seat.wait();
    EXPECT_EQ(model.sites().alive, 0);
    world.recover();
    expect_right_steps(world, model);
  });
  set_interrupt_check({});
  EXPECT_EQ(errors[0], "interrupted here");
  EXPECT_THAT(errors[1], Says("rank 0: interrupted"));
}

}  // namespace
}  // namespace tessera::test::step_pairs_errors_test
