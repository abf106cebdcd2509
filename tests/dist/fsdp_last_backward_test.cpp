// When sums of gradients end and what they are divided by: last backwards, divide factors.

#include <atomic>
#include <cmath>

#include "base/test_hooks.h"
#include "dist/controls.h"
#include "support/test.h"
#include "tessera/clip.h"

namespace tessera::test::fsdp_last_backward_test {
namespace {

// -------------------------------------------------------------------------------- last backward

class LastBackward : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, LastBackward,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(2, 2), std::pair(4, 2)));

TEST_P_ON_RANKS(LastBackward, GradientsAppearAfterTheLastAndAreThoseOfEveryMicroBatchByItself,
                GetParam().first) {
  for (const bool syncs_every : {true, false}) {
    const auto train = [&](bool marks_last) {
      Twins twins(world, GetParam().second);
      const auto optimizer = make_sgd(twins.handle(), sgd(0.05, 0.9));
      for (int step = 0; step < 2; ++step) {
        twins.handle().zero_grad();
        for (int i = 0; i < 3; ++i) {
          const bool last = i == 2;
          twins.handle().set_requires_gradient_sync(syncs_every || last || i == 1);
          if (marks_last) twins.handle().set_is_last_backward(last);
          twins.run(3 * step + i);
          if (!marks_last || last) continue;
          for (const auto& view : twins.handle().shards()) {
            EXPECT_FALSE(view.shard.grad().defined()) << view.contract->name;
          }
        }
        optimizer->step();
      }
      return std::pair{whole_gradients(twins.handle()), whole_parameters(twins.handle())};
    };
    const auto expected = train(false);
    const auto found = train(true);
    expect_same(found.first, expected.first, "gradients");
    expect_same(found.second, expected.second, "parameters");
  }
}

TEST_P_ON_RANKS(LastBackward, ReadersOfGradientsAreToldToWait, GetParam().first) {
  Twins twins(world, GetParam().second);
  const auto optimizer = make_sgd(twins.handle(), sgd(0.05));
  twins.handle().set_is_last_backward(false);
  twins.run(0);
  const auto told = Says("set_is_last_backward(true) before the step's last backward");
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), told);
  EXPECT_THAT(thrown_by([&] { clip_grad_norm(twins.handle(), 1.0); }), told);
  EXPECT_THAT(thrown_by([&] { whole_gradients(twins.handle()); }), told);
  twins.handle().set_is_last_backward(true);
  twins.run(1);
  optimizer->step();
}

TEST(LastBackwardOnce, ReplicasAreSummedAndUseIsAgreedOnce) {
  comm::ThreadRanks four(4, ThreadBackend::kInProcess);
  std::atomic<int> sums{0};
  std::atomic<int> bitmaps{0};
  const test_hooks::Set counted(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    if (rank != 0) return;
    if (batch.label.unit == "replicas") ++sums;
    if (batch.label.unit == "used parameters") ++bitmaps;
  });
  four.run([](World& world) {
    Twins twins(world, 2);
    for (int i = 0; i < 3; ++i) {
      twins.handle().set_is_last_backward(i == 2);
      EXPECT_EQ(twins.run(i).reductions, kBlocks + 1);
    }
  });
  EXPECT_EQ(sums, 1);
  EXPECT_EQ(bitmaps, 1);
}

// Results appear at the wait and not before.
TEST(LastBackwardOnce, NothingIsReadBeforeItsReductionHasBeenWaitedFor) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  const auto train = [&two] {
    Tensors gradients;
    two.run([&](World& world) {
      Twins twins(world);
      for (int i = 0; i < 4; ++i) {
        twins.handle().set_is_last_backward(i == 3);
        twins.run(i);
      }
      auto found = whole_gradients(twins.handle());
      if (world.rank() == 0) gradients = std::move(found);
    });
    return gradients;
  };
  const auto expected = train();
  const test_hooks::Set late(test_hooks::deliver_at_wait, [] { return true; });
  expect_same(train(), expected);
}

// The user lets go of the sum while its reductions are under way.
TEST_P_ON_RANKS(LastBackward, ZeroedGradientsInBetweenBeginANewSum, GetParam().first) {
  Twins twins(world, GetParam().second);
  twins.run(0);
  twins.handle().set_is_last_backward(false);
  twins.run(1);
  twins.handle().zero_grad();
  twins.handle().set_is_last_backward(true);
  twins.run(2);
  twins.expect_plain(2);
}

TEST_ON_RANKS(Controls, AHandleMayGoWhileReductionsWaitForTheLastBackward, 3) {
  {
    Twins twins(world);
    twins.handle().set_is_last_backward(false);
    twins.run(0);
  }
  Twins next(world);
  next.step(0);
}

// ----------------------------------------------------------------------------- divide factor

class DivideFactor : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, DivideFactor,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(2, 2), std::pair(4, 2)));

TEST_P_ON_RANKS(DivideFactor, MayBeSetBetweenSums, GetParam().first) {
  Twins twins(world, GetParam().second);
  twins.step(0, "default");
  EXPECT_THAT(thrown_by([&] { twins.handle().set_gradient_divide_factor(2.0); }),
              Says("zero_grad()", "found a gradient of"));
  for (const double factor : {1.0, 2.0 * world.size(), 3.0, 0.5}) {
    twins.handle().zero_grad();
    twins.handle().set_gradient_divide_factor(factor);
    twins.step(1, concat("factor ", factor), factor);
    EXPECT_EQ(twins.handle().contract().parameters.front().reductions.divide_factor, factor);
  }
  twins.handle().zero_grad();
  for (const double wrong : {0.0, -1.0, 1e-320, 1e39, std::nan(""), HUGE_VAL}) {
    EXPECT_THAT(thrown_by([&] { twins.handle().set_gradient_divide_factor(wrong); }),
                Says("expected a number above 0 that float32 has"));
  }
}

TEST_P_ON_RANKS(DivideFactor, OfOneUnitLeavesTheOthers, GetParam().first) {
  const auto replicas = GetParam().second;
  Twins twins(world, replicas);
  twins.block(1).set_gradient_divide_factor(0.5 * world.size());
  twins.run(0);
  auto expected = plain_gradients_over(twins.plain, world, replicas, world.size(), [&](int rank) {
    backward(squares(twins.plain.forward(input_of(rank, 0, Twins::kWidth))));
  });
  expected["block1.a"].mul_(2);
  expected["block1.b"].mul_(2);
  expect_same(whole_gradients(twins.handle()), expected);
}

}  // namespace
}  // namespace tessera::test::fsdp_last_backward_test
