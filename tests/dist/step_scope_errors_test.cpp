// Refusals of a step scope, by name, and the state after a failure inside one: nothing is left.

#include "dist/body.h"
#include "dist/staged.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/grad_scaler.h"
#include "tessera/trainable.h"

namespace tessera::test::step_scope_errors_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kList = "F0.0 F1.0 I1.0 I0.0 F0.1 W1.0 W0.0 F1.1 B1.1 B0.1";

/// Returns the error of `act` after these slots, on one rank.
std::string refused(const std::string& slots,
                    const std::function<void(StagedModel&, StepScope&)>& act) {
  std::string error;
  ranks(1).run([&](World& world) {
    StagedModel model(data_mesh(world), {});
    StepScope scope(model.handle, {.stages = 2});
    SlotRunner runner(model, scope, inputs(world));
    for (const auto& slot : slots_of(slots)) runner.run(slot);
    error = thrown_by([&] { act(model, scope); });
  });
  return error;
}

// Naive: gradients without the deferred ones, silently.
TEST(StepScopeErrors, WeightGradientsThatAreMissingTwiceOrOfOthersAreNamed) {
  const auto names_owed =
      Says("piece2.linear.weight", "layer piece2.linear", "stage 1", "micro-batch 0");
  EXPECT_THAT(refused("F0.0 F1.0 I1.0 B0.0", [](auto&, auto& scope) { scope.finish(); }),
              AllOf(Says("finish"), names_owed));
  EXPECT_THAT(refused("F0.0 F1.0 I1.0", [](auto&, auto& scope) { scope.reduce(1); }),
              AllOf(Says("reduce"), names_owed));
  EXPECT_EQ(refused("F0.0 F1.0 I1.0 B0.0", [](auto&, auto& scope) { scope.reduce(0); }), "");
  EXPECT_THAT(
      refused("F0.0 F1.0 I1.0 W1.0", [](auto&, auto& scope) { scope.run_weight_gradients(1, 0); }),
      Says("stage 1, micro-batch 0", "were formed"));
  EXPECT_THAT(
      refused("F0.0 F1.0 I1.0", [](auto&, auto& scope) { scope.run_weight_gradients(1, 1); }),
      Says("stage 1, micro-batch 1", "had its forward"));
  EXPECT_THAT(
      refused("F0.0 F1.0 I1.0", [](auto&, auto& scope) { scope.run_weight_gradients(0, 0); }),
      Says("stage 0, micro-batch 0", "before its backward"));
  EXPECT_THAT(
      refused("F0.0 F1.0 B1.0", [](auto&, auto& scope) { scope.run_weight_gradients(1, 0); }),
      Says("none after a kFull"));
}

// Naive: a micro-batch that is reduced late, or not at all.
TEST(StepScopeErrors, WhatComesTwiceOrTooLateIsNamed) {
  const std::string both = "F0.0 F1.0 B1.0 B0.0";
  EXPECT_THAT(refused(both, [](auto&, auto& scope) { scope.begin_forward(0, 0); }),
              Says("stage 0, micro-batch 0", "a second time"));
  EXPECT_THAT(refused(both, [](auto&, auto& scope) { scope.begin_backward(0, 0); }),
              Says("stage 0, micro-batch 0", "a second time"));
  EXPECT_THAT(refused(both, [](auto&, auto& scope) { scope.begin_backward(0, 3); }),
              Says("stage 0, micro-batch 3"));
  EXPECT_THAT(refused(both, [](auto&, auto& scope) { scope.begin_forward(2, 0); }),
              Says("stage 2", "0 to 1"));
  EXPECT_THAT(refused(both,
                      [](auto&, auto& scope) {
                        scope.reduce(0);
                        scope.begin_forward(0, 1);
                      }),
              Says("stage 0, micro-batch 1", "after reduce()"));
  EXPECT_THAT(refused(both + "F0.1",
                      [](auto&, auto& scope) {
                        scope.reduce(0);
                        scope.begin_backward(0, 1);
                      }),
              Says("stage 0, micro-batch 1", "after reduce()"));
  EXPECT_THAT(refused(both,
                      [](auto&, auto& scope) {
                        scope.reshard(1);
                        scope.begin_forward(1, 1);
                      }),
              Says("stage 1, micro-batch 1", "after reshard()"));
  EXPECT_THAT(refused(both,
                      [](auto&, auto& scope) {
                        scope.reshard(1);
                        scope.reshard(1);
                      }),
              Says("reshard", "a second time"));
  EXPECT_THAT(refused(both + "F0.1 F1.1", [](auto&, auto& scope) { scope.finish(); }),
              Says("stage 0, micro-batch 1", "without its backward"));
  EXPECT_THAT(refused(both,
                      [](auto&, auto& scope) {
                        scope.finish();
                        scope.finish();
                      }),
              Says("has finished"));
}

// Naive: a forward that is counted to the micro-batch before.
TEST(StepScopeErrors, WhatWasNotAnnouncedIsNamed) {
  const auto input = [] { return input_of(0, 0, 6); };
  EXPECT_THAT(refused("", [&](auto& model, auto&) { model.handle.call(&Staged::run, 0, input()); }),
              Says("begin_forward()"));
  EXPECT_THAT(refused("",
                      [&](auto& model, auto& scope) {
                        scope.begin_forward(0, 0);
                        const auto y = model.handle.call(&Staged::run, 0, input());
                        backward(squares(y));
                      }),
              Says("begin_backward()"));
  EXPECT_THAT(refused("",
                      [&](auto& model, auto& scope) {
                        scope.begin_forward(0, 0);
                        const auto x = model.handle.call(&Staged::run, 0, input());
                        scope.begin_forward(1, 0);
                        const auto y = model.handle.call(&Staged::run, 1, x);
                        scope.begin_backward(1, 0);
                        backward(squares(y));
                      }),
              Says("stage 1, micro-batch 0", "stage 0, micro-batch 0", "detach"));
  EXPECT_THAT(refused("",
                      [&](auto&, auto& scope) {
                        scope.begin_forward(0, 0);
                        scope.finish();
                      }),
              Says("stage 0, micro-batch 0", "no forward"));
}

// Naive: a step in the middle of which weights, gradients or controls change.
TEST_ON_RANKS(StepScopeErrors, InsideWeightsGradientsAndControlsStay, 1) {
  StagedModel model(data_mesh(world), {});
  const auto optimizer = make_sgd(model.handle, sgd(0.1));
  const auto x = input_of(0, 0, 6);
  StepScope scope(model.handle, {.stages = 2});
  SlotRunner runner(model, scope, inputs(world));
  for (const auto& slot : slots_of(kList)) runner.run(slot);
  const std::map<std::string, std::function<void()>> refused{
      {"optimizer step", [&] { optimizer->step(); }},
      {"zero_grad", [&] { model.handle.zero_grad(); }},
      {"gradient norm", [&] { clip_grad_norm(model.handle, 1.0); }},
      {"GradScaler", [&] { GradScaler scaler(model.handle); }},
      {"StepScope", [&] { StepScope another(model.handle); }},
      {"set_requires_gradient_sync", [&] { model.handle.set_requires_gradient_sync(false); }},
      {"set_requires_replica_reduce", [&] { model.handle.set_requires_replica_reduce(false); }},
      {"set_is_last_backward", [&] { model.handle.set_is_last_backward(false); }},
      {"set_defer_weight_gradients", [&] { model.handle.set_defer_weight_gradients(true); }},
      {"run_weight_gradients", [&] { model.handle.run_weight_gradients(); }},
      {"set_reshard_after_forward", [&] { model.handle.set_reshard_after_forward(false); }},
      {"set_reshard_after_backward", [&] { model.handle.set_reshard_after_backward(false); }},
      {"unshard", [&] { model.handle.unshard(); }},
      {"reshard", [&] { model.handle.reshard(); }},
      {"set_trainable", [&] { set_trainable(model.handle, {{{"scale"}, false}}, {}); }},
      {"whole gradients", [&] { whole_gradients(model.handle); }},
  };
  for (const auto& [what, act] : refused) {
    EXPECT_THAT(thrown_by(act), Says(what, "StepScope that is open")) << what;
  }
  scope.finish();
  StagedModel loop(data_mesh(world), {});
  run_loop(loop, 2, inputs(world));
  expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
  optimizer->step();
}

// Naive: micro-batches of one step that were computed with two versions of a weight.
TEST(StepScopeErrors, WeightsThatChangeInsideAreFound) {
  EXPECT_THAT(refused("F0.0 F1.0 B1.0 B0.0",
                      [](auto& model, auto& scope) {
                        const at::NoGradGuard no_grad;
                        model.handle.shards()[0].shard.mul_(2.0);
                        scope.finish();
                      }),
              Says("were changed inside the step"));
}

// Naive: torch::optim's zero_grad() inside leaves the sums of the step before under this one's.
TEST(StepScopeErrors, GradientsThatAreClearedOrChangedInsideAreFound) {
  using Change = std::function<void(at::Tensor & gradient)>;
  const Change changes[] = {[](auto& gradient) { gradient.reset(); },
                            [](auto& gradient) { gradient.zero_(); },
                            [](auto& gradient) { gradient = at::ones_like(gradient); }};
  for (const int count : {1, 2}) {
    for (const auto& change : changes) {
      const auto errors = errors_of(count, [&](World& world) {
        StagedModel model(data_mesh(world), {});
        run_step(model, slots_of(kList), {.schedule = "list"}, inputs(world));
        StepScope scope(model.handle, {.schedule = "list", .stages = 2});
        for (const auto& view : model.handle.shards()) change(view.shard.mutable_grad());
        SlotRunner runner(model, scope, inputs(world, 1));
        for (const auto& slot : slots_of(kList)) runner.run(slot);
        scope.finish();
      });
      EXPECT_THAT(errors,
                  all_and_one(Says("StepScope::finish", "the gradient of", "inside the step")));
    }
  }
}

// Naive: weights that are not trained, since no gradient of theirs was formed or deferred.
TEST(StepScopeErrors, ABackwardTowardsChosenTensorsIsNamed) {
  for (const auto kind : {Backward::kFull, Backward::kInputOnly}) {
    EXPECT_THAT(refused("",
                        [&](auto& model, auto& scope) {
                          const auto x = input_of(0, 0, 6).requires_grad_();
                          scope.begin_forward(1, 0);
                          const auto loss = squares(model.handle.call(&Staged::run, 1, x));
                          scope.begin_backward(1, 0, kind);
                          torch::autograd::grad({loss}, {x});
                        }),
                Says("stage 1, micro-batch 0", "torch::autograd::grad"));
  }
}

TEST_ON_RANKS(StepScopeErrors, AForwardOfAnEndedScopeHasNoBackwardAnyMore, 1) {
  StagedModel model(data_mesh(world), {});
  at::Tensor y;
  {
    StepScope scope(model.handle, {.stages = 2});
    scope.begin_forward(0, 0);
    y = squares(model.handle.call(&Staged::run, 0, input_of(0, 0, 6)));
    scope.finish();
  }
  EXPECT_THAT(thrown_by([&] { backward(y); }), Says("stage 0, micro-batch 0", "has ended"));
}

class StepScopeFailures : public ::testing::TestWithParam<std::tuple<int, ThreadBackend>> {};
INSTANTIATE_TEST_SUITE_P(Grid, StepScopeFailures,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(ThreadBackend::kInProcess,
                                                              ThreadBackend::kGloo)));

/// Steps that are right: what came before has left nothing.
void expect_right_steps(World& world, StagedModel& model, const std::string& schedule) {
  StagedModel loop(data_mesh(world), model.options);
  for (int step = 0; step < 3; ++step) {
    model.handle.zero_grad();
    loop.handle.zero_grad();
    run_step(model, slots_of(kList), {.schedule = schedule}, inputs(world, step));
    run_loop(loop, 2, inputs(world, step));
    expect_same(whole_gradients(model.handle), whole_gradients(loop.handle), concat("step ", step));
  }
}

// Naive: ranks gather different units, and compute with each other's weights.
TEST_P(StepScopeFailures, ARankThatLeavesWhatWasRecordedIsNamed) {
  const auto& [count, backend] = GetParam();
  for (const auto reshard : {StepReshard::kStep, StepReshard::kMicroBatch}) {
    std::vector<std::string> errors(static_cast<std::size_t>(count));
    RankBarrier meeting(count);
    ranks(count, backend).run([&, reshard](World& world) {
      RankBarrier::Seat seat(meeting);
      StagedModel model(data_mesh(world), {});
      const StepScopeOptions options{.reshard = reshard, .schedule = "list"};
      for (int step = 0; step < 2; ++step) {
        run_step(model, slots_of(kList), options, inputs(world, step));
        model.handle.zero_grad();
      }
      const bool culprit = world.rank() == world.size() - 1;
      if (culprit) model.module->skip = 2;
      errors[static_cast<std::size_t>(world.rank())] = thrown_by([&] {
        run_step(model, slots_of(kList), options, inputs(world, 2));
        comm::barrier(world.control(), "end of the step");
      });
      model.module->skip = -1;
      seat.wait();
      world.recover();
      expect_right_steps(world, model, "list");
    });
    EXPECT_THAT(errors, all_and_one(Says(concat("rank ", count - 1), "stage 1, micro-batch 0",
                                         "unit piece2", "unit piece3")));
  }
}

// Naive: an entered list of another length hangs the others.
TEST(StepScopeErrors, RanksThatDifferAreNamed) {
  const auto errors = [](const std::function<void(World&, StagedModel&)>& body) {
    return errors_of(2, [&](World& world) {
      StagedModel model(data_mesh(world), {});
      body(world, model);
    });
  };
  const auto with = [&](const std::function<void(World&, StepScopeOptions&)>& change) {
    return errors([&](World& world, StagedModel& model) {
      StepScopeOptions options{.schedule = "list"};
      change(world, options);
      run_step(model, slots_of(kList), options, inputs(world));
    });
  };
  EXPECT_THAT(with([](World& world, StepScopeOptions& options) {
                options.schedule = concat("list ", world.rank());
              }),
              Each(Says("schedule list 0", "schedule list 1")));
  EXPECT_THAT(with([](World& world, StepScopeOptions& options) {
                options.reshard = world.rank() == 0 ? StepReshard::kStep : StepReshard::kMicroBatch;
              }),
              Each(Says("kStep", "kMicroBatch")));
  EXPECT_THAT(errors([](World& world, StagedModel& model) {
                model.handle.set_requires_gradient_sync(world.rank() == 0);
                run_step(model, slots_of(kList), {}, inputs(world));
              }),
              Each(Says("set_requires_gradient_sync(false)")));
  // With units that outlast backwards one rank would compare them with the shards, alone.
  EXPECT_THAT(errors([](World& world, StagedModel& model) {
                model.handle.set_reshard_after_backward(false);
                run_step(model, slots_of(kList), {}, inputs(world));
                model.handle.set_reshard_after_backward(world.rank() == 1);
                run_step(model, slots_of(kList), {}, inputs(world, 1));
              }),
              Each(Says("set_reshard_after_backward(false)")));
  // The same units in another order of micro-batches: at the first collective that tells, or at the
  // end where there is none in between.
  const auto in_orders = [&](const std::string& one, const std::string& other) {
    return errors([&](World& world, StagedModel& model) {
      for (int step = 0; step < 2; ++step) {
        run_step(model, slots_of(step == 1 && world.rank() == 1 ? other : one), {}, inputs(world));
      }
    });
  };
  EXPECT_THAT(in_orders("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1",
                        "F0.1 F0.0 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"),
              all_and_one(Says("micro-batch 0", "micro-batch 1")));
  EXPECT_THAT(in_orders("F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1",
                        "F0.0 F0.1 F1.0 F1.1 B1.0 B0.0 B1.1 B0.1"),
              Each(Says("rank 0 has begin_backward (kFull) of stage 1, micro-batch 1",
                        "rank 1 has begin_backward (kFull) of stage 0, micro-batch 0")));
}

struct Refusal {
  const char* what;
  std::function<void(StagedModel&, StepScope&)> act;  ///< of one rank, before the end of the step
  std::vector<bool> recorded = {false, true};         ///< whether there have been steps before
};

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> all = {
      {"found no forward of the model",
       [](auto&, auto& scope) { scope.begin_forward(0, 7); },
       {false}},
      {"without its backward",
       [](auto& model, auto& scope) {
         scope.begin_forward(1, 7);
         model.handle.call(&Staged::run, 1, input_of(0, 0, 6));
       }},
      {"were changed inside the step",
       [](auto& model, auto&) {
         const at::NoGradGuard no_grad;
         for (const auto& view : model.handle.shards()) at::Tensor(view.shard).mul_(1.0);
       }},
      {"the gradient of",
       [](auto& model, auto&) {
         for (const auto& view : model.handle.shards()) {
           if (view.shard.grad().defined()) view.shard.mutable_grad().zero_();
         }
       },
       {true}},
  };
  return all;
}

// Naive: it throws, and the others wait for it in the agreement until the timeout.
TEST_P(StepScopeFailures, WhatOneRankRefusesAtTheEndAllRefuse) {
  const auto& [count, backend] = GetParam();
  for (const Refusal& refusal : refusals()) {
    for (const bool recorded : refusal.recorded) {
      RankBarrier meeting(count);
      ranks(count, backend).run([&](World& world) {
        RankBarrier::Seat seat(meeting);
        StagedModel model(data_mesh(world), {});
        if (recorded) expect_right_steps(world, model, "list");
        const bool culprit = world.rank() == world.size() - 1;
        const auto error = thrown_by([&] {
          StepScope scope(model.handle, {.schedule = "list", .stages = 2});
          SlotRunner runner(model, scope, inputs(world));
          for (const auto& slot : slots_of(kList)) runner.run(slot);
          if (culprit) refusal.act(model, scope);
          scope.finish();
        });
        const std::string by = culprit ? "" : concat("rank ", count - 1, ": ");
        EXPECT_THAT(error, AllOf(StartsWith(by + "StepScope::"), Says(refusal.what)))
            << "rank " << world.rank();
        seat.wait();
        world.recover();
        expect_right_steps(world, model, "list");
      });
    }
  }
}

// The missing call may still be made.
TEST_P(StepScopeFailures, AStepWhoseEndWasRefusedIsOpenAsBefore) {
  const auto& [count, backend] = GetParam();
  ranks(count, backend).run([](World& world) {
    StagedModel model(data_mesh(world), {});
    StagedModel loop(data_mesh(world), {});
    StepScope scope(model.handle, {.stages = 2});
    SlotRunner runner(model, scope, inputs(world));
    for (const auto& slot : slots_of(kList)) {
      if (slot.kind != 'W' || slot.stage != 0) runner.run(slot);
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(thrown_by([&] { scope.finish(); }),
                  Says("StepScope::finish", "piece0.linear.weight"));
      EXPECT_FALSE(world.aborted());
    }
    runner.run({'W', 0, 0});
    scope.finish();
    run_loop(loop, 2, inputs(world));
    expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
  });
}

// Nothing of it is among the calls of the step. Naive: those that refuse nothing have ended theirs.
TEST_P(StepScopeFailures, AStepWhoseEndOneRankRefusedIsOpenAsBeforeOnEach) {
  const auto& [count, backend] = GetParam();
  ranks(count, backend).run([](World& world) {
    StagedModel model(data_mesh(world), {});
    StagedModel loop(data_mesh(world), {});
    for (int step = 0; step < 3; ++step) {  // the first one records, and gradients add up
      const bool refuses = world.rank() == (world.size() - 1 + step) % world.size();
      StepScope scope(model.handle, {.schedule = "list", .stages = 2});
      SlotRunner runner(model, scope, inputs(world, step));
      for (const auto& slot : slots_of(kList)) runner.run(slot);
      std::vector<at::Tensor> gradients;
      for (const auto& view : model.handle.shards()) {
        gradients.push_back(view.shard.grad());
        if (refuses) view.shard.mutable_grad() = at::ones_like(view.shard);
      }
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(thrown_by([&] { scope.finish(); }),
                    Says("StepScope::finish", "the gradient of"));
        EXPECT_FALSE(world.aborted());
      }
      auto gradient = gradients.begin();
      for (const auto& view : model.handle.shards()) view.shard.mutable_grad() = *gradient++;
      scope.finish();
      run_loop(loop, 2, inputs(world, step));
      expect_same(whole_gradients(model.handle), whole_gradients(loop.handle));
    }
  });
}

enum class When : std::uint8_t { kForward, kBackward, kBetween };

class ThrowsInBackward : public torch::autograd::Function<ThrowsInBackward> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 1.0; }
  static variable_list backward(AutogradContext*, const variable_list&) {
    throw std::runtime_error("the user's backward went wrong");
  }
};

// Naive: the others wait, and the next step adds to half a step's sums or redeems its tickets.
TEST_P(StepScopeFailures, AfterAnExceptionAndRecoverTheNextStepIsRight) {
  const auto& [count, backend] = GetParam();
  for (const bool recorded : {false, true}) {
    for (const auto when : {When::kForward, When::kBackward, When::kBetween}) {
      RankBarrier meeting(count);
      ranks(count, backend).run([&](World& world) {
        RankBarrier::Seat seat(meeting);
        StagedModel model(data_mesh(world), {});
        const StepScopeOptions options{.schedule = "list", .stages = 2};
        if (recorded) expect_right_steps(world, model, "list");
        const bool culprit = world.rank() == world.size() - 1;
        const auto error = thrown_by([&] {
          StepScope scope(model.handle, options);
          SlotRunner runner(model, scope, inputs(world));
          if (culprit && when == When::kBackward) {
            runner.scaled = [](const at::Tensor& loss) { return ThrowsInBackward::apply(loss); };
          }
          // Some gradients are pending, some are in their slots.
          for (const auto& slot : slots_of("F0.0 F1.0 F0.1 I1.0 I0.0 W1.0")) runner.run(slot);
          if (culprit && when == When::kForward) {
            model.module->pieces[3]->before = [] {
              throw std::runtime_error("the user's forward went wrong");
            };
          }
          if (culprit && when == When::kBetween) {
            throw std::runtime_error("the user's loader went wrong");
          }
          runner.run({'F', 1, 1});
          comm::barrier(world.control(), "end of the step");
        });
        model.module->pieces[3]->before = nullptr;
        EXPECT_NE(error, "");
        if (culprit) {
          EXPECT_THAT(error, Says("the user's"));
        }
        seat.wait();
        world.recover();
        expect_right_steps(world, model, "list");
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test::step_scope_errors_test
