// [Note: failure]: an exception inside a sharded step frees the other ranks at once and can be
// recovered from.

#include <thread>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_failure_test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWidth = 5;

/// An operation of the user that throws in backward.
class ThrowsInBackward : public torch::autograd::Function<ThrowsInBackward> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 1.0; }
  static variable_list backward(AutogradContext*, variable_list) {
    throw std::runtime_error("the user's backward went wrong");
  }
};

enum class When { kForward, kInnerForward, kBackward };

class Failures : public ::testing::TestWithParam<std::tuple<int, When, ThreadBackend>> {};
INSTANTIATE_TEST_SUITE_P(
    Grid, Failures,
    ::testing::Combine(::testing::Values(1, 2, 3),
                       ::testing::Values(When::kForward, When::kInnerForward, When::kBackward),
                       ::testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo)));

// Naive: the other ranks wait in their collectives until the timeout (20 s here), and the next step
// starts on half-gathered units and half-filled slots.
TEST_P(Failures, OthersLeavePromptlyAndTheNextStepIsRight) {
  const auto [count, when, backend] = GetParam();
  RankBarrier meeting(count);
  ranks(count, backend).run([when, &meeting](World& world) {
    RankBarrier::Seat seat(meeting);
    Chain plain(1, 3, kWidth);
    ShardedChain model(data_mesh(world), 1, 3, kWidth);
    const auto optimizer = make_sgd(model.handle, sgd(0.0));
    const auto step = [&](int number) {
      model.handle.zero_grad();
      backward(squares(model.handle.forward(input_of(world.rank(), number, kWidth))));
      expect_same(whole_gradients(model.handle),
                  gradients_of_squares(plain, world.size(), number, kWidth),
                  concat("step ", number));
      optimizer->step();
    };
    step(0);
    step(1);
    const bool culprit = world.rank() == world.size() - 1;
    seat.wait();  // an abort would end a step that is still under way
    std::string error;
    const auto seconds = seconds_of([&] {
      error = thrown_by([&] {
        auto x = input_of(world.rank(), 2, kWidth);
        if (culprit && when == When::kForward)
          throw std::runtime_error("the user's loader went wrong");
        if (culprit && when == When::kInnerForward) {
          model.chain->blocks[1]->before = [] {
            throw std::runtime_error("the user's forward went wrong");
          };
        }
        if (when == When::kBackward) x.requires_grad_();
        auto y = model.handle.forward(
            culprit && when == When::kBackward ? ThrowsInBackward::apply(x) : x * 1.0);
        backward(squares(y));
        // A rank that had nothing left to wait for learns of it at its next collective.
        comm::barrier(world.control(), "end of the step");
      });
      if (when == When::kForward && culprit)
        world.abort(error);  // outside of any handle: no other rank can know
    });
    model.chain->blocks[1]->before = nullptr;
    EXPECT_NE(error, "");
    if (culprit) {
      EXPECT_THAT(error, Says("the user's"));
    }
    EXPECT_LT(seconds, 5) << error;
    world.recover();
    step(3);
    step(4);
    EXPECT_EQ(model.handle.unit()->expected(), 0);
  });
}

TEST_ON_RANKS(FailuresOfOne, ARankAloneContinuesWithoutRecover, 1) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  for (const bool in_backward : {true, false}) {
    auto x = input_of(0, 0, kWidth).requires_grad_();
    model.chain->blocks[1]->before = [&] {
      if (!in_backward) throw std::runtime_error("forward");
    };
    EXPECT_THAT(
        thrown_by([&] { backward(squares(model.handle.forward(ThrowsInBackward::apply(x)))); }),
        Says(in_backward ? "the user's backward" : "forward"));
    model.chain->blocks[1]->before = nullptr;
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(0, 1, kWidth))));
    expect_same(whole_gradients(model.handle), gradients_of_squares(plain, 1, 1, kWidth));
  }
}

// Naive: .grad outlives the sum that it shows, and comes back for some parameters of a bucket.
TEST_ON_RANKS(FailuresOfOne, GradientsOfTheFailedStepAreForgottenWithoutZeroGradToo, 1) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  backward(squares(model.handle.forward(input_of(0, 0, kWidth))));
  model.chain->blocks[1]->before = [] { throw std::runtime_error("forward"); };
  EXPECT_NE(thrown_by([&] { model.handle.forward(input_of(0, 1, kWidth)); }), "");
  model.chain->blocks[1]->before = nullptr;
  backward(squares(model.handle.forward(input_of(0, 2, kWidth))));
  expect_same(whole_gradients(model.handle), gradients_of_squares(plain, 1, 2, kWidth));
}

// Naive: the second micro-batch runs again alone, and the step takes a part of the gradient.
TEST_ON_RANKS(FailuresOfOne, AStepWhoseFirstMicroBatchIsGoneIsRefusedUntilZeroGrad, 1) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto optimizer = make_sgd(model.handle, sgd(0.1));
  const auto run = [&](int step) {
    backward(squares(model.handle.forward(input_of(0, step, kWidth))));
  };
  run(0);
  model.chain->blocks[1]->before = [] { throw std::runtime_error("forward"); };
  EXPECT_NE(thrown_by([&] { run(1); }), "");
  model.chain->blocks[1]->before = nullptr;
  run(1);
  EXPECT_THAT(thrown_by([&] { clip_grad_norm(model.handle, 1.0); }), Says("zero_grad()"));
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("before the failure is gone"));
  for (const bool to_none : {true, false}) {
    model.handle.zero_grad(to_none);
    run(0);
    run(1);
    EXPECT_EQ(thrown_by([&] { optimizer->step(); }), "");
  }
}

// Naive: the other ranks wait for the one that recovers, and it for them, until the timeout.
TEST(FailuresOfMany, ARankThatRecoversSilentlyTakesTheOthersAlong) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    ranks(2, backend).run([](World& world) {
      ShardedChain model(data_mesh(world), 1, 2, kWidth);
      const auto seconds = seconds_of([&] {
        EXPECT_NE(thrown_by([&] {
                    auto y = model.handle.forward(input_of(0, 0, kWidth));
                    if (world.rank() == 0) {
                      y.register_hook(
                          [](at::Tensor) -> at::Tensor { throw std::runtime_error("a hook"); });
                    }
                    backward(squares(y));
                    comm::barrier(world.control(), "end of the step");
                  }),
                  "");
        world.recover();
      });
      EXPECT_LT(seconds, 5);
      model.handle.zero_grad();
      backward(squares(model.handle.forward(input_of(0, 1, kWidth))));
    });
  }
}

/// In whose backward another thread, as one of a device, lets go of a backward that has failed.
class LeavesToAnotherThread : public torch::autograd::Function<LeavesToAnotherThread> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, fsdp::Runtime* runtime) {
    context->saved_data["runtime"] = reinterpret_cast<std::int64_t>(runtime);
    return x * 1.0;
  }
  static variable_list backward(AutogradContext* context, variable_list) {
    auto& runtime = *reinterpret_cast<fsdp::Runtime*>(context->saved_data["runtime"].toInt());
    const auto generation = runtime.generation();
    const auto epoch = runtime.world().recoveries();
    std::thread([&] { runtime.abandon_backward(generation, epoch); }).join();
    EXPECT_EQ(runtime.generation(), generation);
    EXPECT_TRUE(runtime.has_failed());
    EXPECT_EQ(runtime.world().aborted(), runtime.world().size() > 1);
    throw std::runtime_error("on another thread");
  }
};

// A thread that comes late tells the other ranks at once and accesses nothing that its rank's thread
// may be using; that one ends the step at its next call. Naive: it clears the list of open forwards
// while the rank's thread is in one.
TEST(FailuresOfMany, AnotherThreadLeavesANoteForTheRanksOwn) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      Chain plain(1, 2, kWidth);
      ShardedChain model(data_mesh(world), 1, 2, kWidth);
      const auto optimizer = make_sgd(model.handle, sgd(0.0));
      auto& runtime = model.handle.unit()->runtime();
      auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
      auto kept = squares(model.handle.forward(x));
      const auto error = thrown_by([&] {
        backward(squares(model.handle.forward(LeavesToAnotherThread::apply(x, &runtime))));
      });
      // The second of two that leave at once may be told of the first.
      EXPECT_THAT(error, AnyOf(Says("on another thread"), Says("an exception left")));
      EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("an exception has ended"));
      EXPECT_THAT(thrown_by([&] { backward(kept); }), Says("before a failure"));
      world.recover();
      model.handle.zero_grad();
      backward(squares(model.handle.forward(input_of(world.rank(), 1, kWidth))));
      expect_same(whole_gradients(model.handle),
                  gradients_of_squares(plain, world.size(), 1, kWidth));
    });
  }
}

/// In its backward another thread passes that has read the generation and then slept through a
/// recovery: it knows the epoch of before.
class IsMetByALateThread : public torch::autograd::Function<IsMetByALateThread> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, fsdp::Runtime* runtime) {
    context->saved_data["runtime"] = reinterpret_cast<std::int64_t>(runtime);
    return x * 1.0;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto& runtime = *reinterpret_cast<fsdp::Runtime*>(context->saved_data["runtime"].toInt());
    const auto generation = runtime.generation();
    const auto epoch = runtime.world().recoveries() - 1;
    std::thread([&] { runtime.abandon_backward(generation, epoch); }).join();
    EXPECT_FALSE(runtime.world().aborted());
    return {gradients[0], at::Tensor()};
  }
};

// Naive: the World of ranks that have recovered is aborted by a backward of before.
TEST(FailuresOfMany, AThreadThatSleptThroughARecoveryAbortsNoOne) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    RankBarrier meeting(2);
    ranks(2, backend).run([&](World& world) {
      RankBarrier::Seat seat(meeting);
      ShardedChain model(data_mesh(world), 1, 2, kWidth);
      seat.wait();  // an abort would end what the other one is still in
      world.abort("a bad step");
      world.recover();
      auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
      auto& runtime = model.handle.unit()->runtime();
      // Behind all units: the backward is under way.
      const auto loss = squares(model.handle.forward(IsMetByALateThread::apply(x, &runtime)));
      EXPECT_EQ(thrown_by([&] { backward(loss); }), "");
      EXPECT_FALSE(world.aborted());
      comm::barrier(world.control(), "all are well");
    });
  }
}

/// Catches what its inner unit throws and continues, which a sharded step does not allow.
class Swallows : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    try {
      return handle->forward(x);
    } catch (const std::runtime_error&) {
      return calls_again ? handle->forward(x) : x;
    }
  }
  std::shared_ptr<Sharded<Block>> handle;
  bool calls_again = false;
};

// Naive: counters of calls go out of step, and a later forward crashes.
TEST_ON_RANKS(FailuresOfOne, AnInnerExceptionThatAnOuterForwardCatchesIsNamed, 1) {
  for (const bool calls_again : {false, true}) {
    auto block = std::make_shared<Block>(1, kWidth);
    auto outer = std::make_shared<Swallows>();
    outer->calls_again = calls_again;
    outer->handle = outer->register_module(
        "inner", std::make_shared<Sharded<Block>>(fully_shard(block, data_mesh(world))));
    auto handle = fully_shard(outer, data_mesh(world));
    bool throws = true;
    block->before = [&] {
      if (std::exchange(throws, false)) throw std::runtime_error("once");
    };
    EXPECT_THAT(thrown_by([&] { handle.forward(input_of(0, 0, kWidth)); }), Says("exception"));
    Block plain(1, kWidth);
    const auto x = input_of(0, 0, kWidth);
    EXPECT_TRUE(same_bits(handle.forward(x).detach(), plain.forward(x).detach()));
    EXPECT_EQ(handle.unit()->progress().open_calls, 0);
  }
}

TEST_ON_RANKS(FailuresOfMany, AForwardAfterAFailureAsksForRecover, 2) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  model.chain->blocks[0]->before = [&] {
    if (world.rank() == 0) throw std::runtime_error("rank 0 throws");
  };
  (void)thrown_by([&] {
    backward(squares(model.handle.forward(input_of(0, 0, kWidth))));
    comm::barrier(world.control(), "end of the step");
  });
  EXPECT_THAT(thrown_by([&] { model.handle.forward(input_of(0, 0, kWidth)); }), Says("recover()"));
  world.recover();
}

}  // namespace
}  // namespace tessera::test::fsdp_failure_test
