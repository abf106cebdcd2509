// set_trainable: what it refuses before anything moves, and its effect with other controls.

#include "dist/trainable_changes.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/grad_scaler.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_trainable_errors_test {
namespace {

constexpr std::int64_t kWidth = 13;

TEST_ON_RANKS(TrainableRefused, NothingMovesBeforeTheStepIsOver, 2) {
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  const auto change = [&] {
    return thrown_by([&] { set_trainable(model.handle, {freeze({"scale"})}); });
  };
  auto loss = squares(model.handle.forward(input_of(world.rank(), 0, kWidth)));
  EXPECT_THAT(change(), Says("backward"));
  backward(loss);
  EXPECT_THAT(change(), Says("gradient of", "zero_grad"));
  model.handle.zero_grad();
  model.handle.set_requires_gradient_sync(false);
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_THAT(change(), Says("wait to be reduced"));
  model.handle.set_requires_gradient_sync(true);
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  model.handle.zero_grad();
  EXPECT_EQ(change(), "");
}

TEST_ON_RANKS(TrainableRefused, ChangesThatCannotBeMeant, 2) {
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  const auto change = [&](const TrainableChange& one) {
    return thrown_by([&] { set_trainable(model.handle, {one}); });
  };
  EXPECT_THAT(change(freeze({"blok*"})), Says("blok*"));
  EXPECT_THAT(change(freeze({"*"})), Says("nothing left to train"));
  EXPECT_THAT(change(freeze({})), Says("match"));
}

TEST(TrainableRefused, ChangesThatDifferBetweenRanksAreNamedAndNothingMoves) {
  for (const auto& error : errors_of(3, [](World& world) {
         ShardedChain model(data_mesh(world), 1, 1, kWidth);
         set_trainable(model.handle, {freeze({world.rank() == 1 ? "block0.a" : "block0.b"})});
       })) {
    EXPECT_THAT(error, Says("trainable parameters differ between ranks", "block0."));
  }
}

TEST_ON_RANKS(TrainableRefused, AnOptimizerThatWasLeftOut, 2) {
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  const auto optimizer = make_adamw(model.handle, adamw(0.01));
  set_trainable(model.handle, {freeze({"scale"})});
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("set_trainable"));
}

TEST_ON_RANKS(TrainableRefused, Float16WithoutLossScalingIsNotTrained, 2) {
  PrecisionPolicy policy;
  policy.param_dtype = DType::kFloat16;
  PrecisionRule rule;
  rule.match = {"scale"};
  rule.param_dtype = DType::kFloat32;
  policy.rules = {rule};
  const auto chain = std::make_shared<Chain>(1, 1, kWidth);
  for (const auto& p : chain->blocks[0]->parameters()) p.set_requires_grad(false);
  auto handle = fully_shard(chain, data_mesh(world), policy);
  EXPECT_THAT(thrown_by([&] { set_trainable(handle, {unfreeze({"block0.a"})}); }),
              Says("block0.a", "float16"));
}

TEST_ON_RANKS(TrainableRefused, InnerHandlesAndOptimizersThatAreNotOfTheModel, 2) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  ShardedChain other(data_mesh(world), 1, 1, kWidth);
  EXPECT_THAT(thrown_by([&] { set_trainable(*model.chain->handles[0], {freeze({"a"})}); }),
              Says("expected the outermost one"));
  const auto mine = make_adamw(model.handle, adamw(0.01));
  const auto foreign = make_adamw(other.handle, adamw(0.01));
  using Optimizers = std::vector<Optimizer*>;
  for (const auto& follow :
       {Optimizers{nullptr}, Optimizers{mine.get(), mine.get()}, Optimizers{foreign.get()}}) {
    EXPECT_THAT(thrown_by([&] { set_trainable(model.handle, {freeze({"scale"})}, follow); }),
                Says("each of this model once"));
  }
}

TEST(TrainableRefused, OptimizersThatDifferBetweenRanks) {
  for (const auto& error : errors_of(2, [](World& world) {
         ShardedChain model(data_mesh(world), 1, 1, kWidth);
         const auto optimizer = make_adamw(model.handle, adamw(0.01));
         std::vector<Optimizer*> follow;
         if (world.rank() == 0) follow.push_back(optimizer.get());
         set_trainable(model.handle, {freeze({"scale"})}, follow);
       })) {
    EXPECT_THAT(error, Says("differ between ranks", "optimizer AdamW"));
  }
}

TEST(TrainableRefused, ValuesThatAReplicatedCopyCannotHoldAreNamedBeforeAnythingMoves) {
  for (const auto& error : errors_of(2, [](World& world) {
         PrecisionPolicy policy;
         policy.param_dtype = DType::kFloat16;
         policy.loss_scaling = true;
         auto chain = std::make_shared<Chain>(1, 1, kWidth);
         {
           const at::NoGradGuard no_grad;
           chain->scale.fill_(1e5);  // owned by one rank only
         }
         auto handle = fully_shard(chain, data_mesh(world), policy);
         auto change = freeze({"scale"});
         change.frozen_as = FrozenAs::kReplicate;
         const auto before = whole_parameters(handle);
         const auto error = thrown_by([&] { set_trainable(handle, {change}); });
         expect_same(whole_parameters(handle), before);
         throw Error(ErrorKind::kContract, error);
       })) {
    EXPECT_THAT(error, Says("scale", "100000"));
  }
}

// FSDP2's way to freeze. Naive: the shard says one thing, the reduction and the optimizer do
// another.
TEST(TrainableRefused, RequiresGradOfAShardIsNamedAtTheNextForward) {
  for (const int count : {1, 2}) {
    for (const bool trained : {true, false}) {
      const auto errors = errors_of(count, [&](World& world) {
        ShardedChain model(data_mesh(world), 1, 2, kWidth);
        if (!trained) set_trainable(model.handle, {freeze({"block1.a"})});
        const auto forward = [&] { model.handle.forward(input_of(world.rank(), 0, kWidth)); };
        forward();
        model.handle.named_parameters()["block1.a"].requires_grad_(!trained);
        forward();
      });
      EXPECT_THAT(errors, Contains(Says(concat("parameter block1.a: found requires_grad ",
                                               trained ? "off" : "on", " on its shard"),
                                        "call set_trainable")));
      EXPECT_THAT(errors, Each(::testing::Ne("")));
    }
  }
}

class TrainableAndControls : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TrainableAndControls, ::testing::Values(1, 2, 3, 4));

TEST_P_ON_RANKS(TrainableAndControls, ADivideFactorHoldsForWhatIsTrainedLater, GetParam()) {
  const auto gradients = [&](bool frozen_first) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    if (frozen_first) set_trainable(model.handle, {freeze({"block1.*"})});
    model.handle.set_gradient_divide_factor(3.0);
    const auto run = [&] {
      model.handle.zero_grad();
      backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
    };
    run();
    model.handle.zero_grad();
    if (frozen_first) set_trainable(model.handle, {unfreeze({"block1.*"})});
    run();
    return whole_gradients(model.handle);
  };
  expect_same(gradients(true), gradients(false));
}

// Two optimizers of parts: each continues with its own.
TEST_P_ON_RANKS(TrainableAndControls, OptimizersOfPartsKeepTheirParts, GetParam()) {
  const auto run = [&](bool changes) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    const auto one = make_sgd(*model.chain->handles[0], sgd(0.1, 0.9));
    const auto two = make_sgd(*model.chain->handles[1], sgd(0.01, 0.5));
    for (int step = 0; step < 4; ++step) {
      model.handle.zero_grad();
      if (changes && step == 2) {
        set_trainable(model.handle, {freeze({"block0.a"})}, {one.get(), two.get()});
        set_trainable(model.handle, {unfreeze({"block0.a"})}, {one.get(), two.get()});
      }
      backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
      one->step();
      two->step();
    }
    return whole_parameters(model.handle);
  };
  const auto with = run(true);
  for (const auto& [name, value] : run(false)) {
    // Momentum and step are roundings; vector and scalar loops may fuse them differently.
    EXPECT_TRUE(at::allclose(with.at(name), value, 1e-6, 1e-7)) << name;
  }
}

// They are bf16 parameters from then on, with a master when they are trained again.
TEST_P_ON_RANKS(TrainableAndControls, WhatWasReplicatedIsTrainedAgainFromItsRoundedValues,
                GetParam()) {
  const auto policy = in_bfloat16();
  const auto chain = std::make_shared<Chain>(1, 2, kWidth);
  chain->shard_blocks(data_mesh(world), policy);
  auto handle = fully_shard(chain, data_mesh(world), policy);
  const auto optimizer = make_adamw(handle, adamw(0.01));
  auto rounded = whole_parameters(handle);
  auto change = freeze({"block0.*"});
  change.frozen_as = FrozenAs::kReplicate;
  set_trainable(handle, {change}, {optimizer.get()});
  for (const auto& view : handle.shards()) {
    if (!view.contract->replicated()) continue;
    EXPECT_EQ(view.shard.numel(), view.contract->numel()) << view.contract->name;
    EXPECT_EQ(view.shard.scalar_type(), at::kBFloat16) << view.contract->name;
  }
  backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_EQ(whole_gradients(handle).count("block0.a"), 0U);
  handle.zero_grad();
  set_trainable(handle, {unfreeze({"block0.*"})}, {optimizer.get()});
  for (auto& [name, value] : rounded) {
    if (name.rfind("block0.", 0) == 0) value = value.to(at::kBFloat16);
  }
  expect_same(whole_parameters(handle), rounded);
  backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_EQ(whole_gradients(handle).count("block0.a"), 1U);
  optimizer->step();
}

// Naive: the shard's new values with the bits of the old ones. The write leaves out ranks that own
// nothing of the parameter, as users do.
TEST_ON_RANKS(TrainableAndWrites, RanksThatOwnNothingAtTheTimeOfAWriteJoinNoOldBits, 3) {
  // 13 elements: one rank of three owns all of them until the large parameter leaves.
  std::vector<Tensors> ends;
  for (const bool changes : {false, true}) {
    auto handle =
        fully_shard(std::make_shared<Chain>(3, 1, kWidth, at::kBFloat16), data_mesh(world));
    const auto optimizer = make_adamw(handle, adamw(0.01));
    const auto step = [&] {
      handle.zero_grad();
      backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
      for (const auto& view : handle.shards()) {
        if (view.contract->name == "block0.a") view.shard.mutable_grad().reset();
      }
      optimizer->step();
    };
    step();
    handle.zero_grad();
    for (const auto& view : handle.shards()) {
      if (view.contract->name == "block0.b" && view.shard.numel() > 0) {
        view.shard.detach().mul_(0.5);
      }
    }
    if (changes) set_trainable(handle, {freeze({"block0.a"})}, {optimizer.get()});
    step();
    ends.push_back(whole_parameters(handle));
  }
  expect_same(ends[1], ends[0]);
}

TEST_P(TrainableAndControls, AFailedStepIsForgottenFirst) {
  if (GetParam() == 1) return;
  ranks(GetParam()).run([](World& world) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    const auto optimizer = make_adamw(model.handle, adamw(0.01));
    const auto step = [&] {
      backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
    };
    step();
    model.chain->blocks[1]->before = [&] {
      if (world.rank() == 0) throw std::runtime_error("for the test");
    };
    EXPECT_NE(thrown_by(step), "");
    model.chain->blocks[1]->before = nullptr;
    world.recover();
    EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("an exception has ended"));
    set_trainable(model.handle, {freeze({"block0.a"})}, {optimizer.get()});
    for (const auto& view : model.handle.shards()) EXPECT_FALSE(view.shard.grad().defined());
    model.handle.zero_grad();
    step();
    EXPECT_EQ(whole_gradients(model.handle).count("block0.a"), 0U);
    optimizer->step();
  });
}

// Naive: each rank divides by its own scale, and the same norm lets all of them step.
TEST(ScalersThatDiffer, AreNamed) {
  const auto errors = errors_of(2, [](World& world) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    GradScalerOptions options;
    options.init_scale = world.rank() == 0 ? 1024.0 : 2048.0;
    GradScaler scaler(model.handle, options);
    backward(scaler.scaled(squares(model.handle.forward(input_of(0, 0, kWidth)))));
  });
  // The rank that sees it first ends the others' waits.
  EXPECT_THAT(errors, Contains(Says("a loss scale of 2^")));
  EXPECT_THAT(errors, Each(::testing::Ne("")));
}

}  // namespace
}  // namespace tessera::test::fsdp_trainable_errors_test
