// Optimizers, norm and clip over shards: PyTorch's numbers on the whole model, for every layout.
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "fsdp/optim/optimizer_registry.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_optim_test {
namespace {

constexpr std::int64_t kWidth = 7;
constexpr int kSteps = 5;

class OptimOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OptimOnRanks, ::testing::Values(1, 2, 3, 4));

/// Steps both with the same gradients; the plain module's are those that the sharded one found.
template <class Step>
void train_both(World& world, ShardedChain& model, Chain& plain, Optimizer& ours,
                const Step& theirs, const std::function<void()>& compare) {
  for (int step = 0; step < kSteps; ++step) {
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
    const auto gradients = whole_gradients(model.handle);
    for (const auto& entry : plain.named_parameters())
      entry.value().mutable_grad() = gradients.at(entry.key());
    ours.step();
    theirs();
    compare();
  }
}

TEST_P_ON_RANKS(OptimOnRanks, SgdWithMomentumAndDecayIsPyTorchsWithinRounding, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  Chain plain(1, 2, kWidth);
  const auto ours = make_sgd(model.handle, sgd(0.05, 0.9, 0.1));
  torch::optim::SGD theirs(plain.parameters(),
                           torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
  train_both(
      world, model, plain, *ours, [&] { theirs.step(); },
      [&] {
        for (const auto& [name, value] : whole_parameters(model.handle)) {
          // Decay, momentum and step are three roundings each; vector and scalar loops may fuse
          // them differently.
          EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name].detach(), 1e-6, 1e-7))
              << name;
        }
      });
}

TEST_P_ON_RANKS(OptimOnRanks, AdamWIsPyTorchsWithinRounding, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  Chain plain(1, 2, kWidth);
  AdamWOptions options;
  options.lr = 0.01;
  const auto ours = make_adamw(model.handle, options);
  torch::optim::AdamW theirs(plain.parameters(), torch::optim::AdamWOptions(0.01)
                                                     .betas({options.beta1, options.beta2})
                                                     .eps(options.eps)
                                                     .weight_decay(options.weight_decay));
  train_both(
      world, model, plain, *ours, [&] { theirs.step(); },
      [&] {
        for (const auto& [name, value] : whole_parameters(model.handle)) {
          // The fused kernel divides in another order: a few units in the last place a step.
          EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name].detach(), 1e-5, 1e-6))
              << name;
        }
      });
}

// Every layout computes each element alone: the same values on 1, 2, 3 and 4 ranks, up to the last
// bit (loops over other lengths may fuse a product and a sum, or not).
class Kinds : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Both, Kinds, ::testing::Values(false, true),
                         [](const auto& adam) { return adam.param ? "AdamW" : "Sgd"; });

TEST_P(Kinds, TheSameGradientsGiveTheSameValuesOnAnyNumberOfRanks) {
  Tensors expected;
  for (const int count : {1, 2, 3, 4}) {
    ranks(count).run([&](World& world) {
      auto handle =
          fully_shard(std::make_shared<Chain>(1, 2, kWidth), data_mesh(world), {}, undivided());
      const auto optimizer =
          GetParam() ? make_adamw(handle, adamw(0.01)) : make_sgd(handle, sgd(0.013, 0.9, 0.07));
      for (int step = 0; step < 3; ++step) {
        handle.zero_grad();
        // Only rank 0 has a gradient: no sum differs.
        backward(squares(handle.forward(input_of(0, step, kWidth))) *
                 (world.rank() == 0 ? 1.0 : 0.0));
        clip_grad_norm(handle, 1.0);
        optimizer->step();
      }
      const auto found = whole_parameters(handle);
      if (count == 1) {
        expected = found;
      } else {
        for (const auto& [name, value] : expected) {
          EXPECT_TRUE(at::allclose(found.at(name).cpu(), value.cpu(), 1e-6, 1e-7))
              << count << " " << name;
        }
      }
    });
  }
}

TEST_P_ON_RANKS(OptimOnRanks, WhatNoDecayNamesIsNotDecayedAndAMisspeltNameIsRefused, GetParam()) {
  for (const bool adam : {false, true}) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    auto with_momentum = sgd(0.5, 0.0, 0.5);
    auto adaptive = adamw(0.5, 0.5);
    with_momentum.no_decay = adaptive.no_decay = {"scale"};
    const auto optimizer =
        adam ? make_adamw(model.handle, adaptive) : make_sgd(model.handle, with_momentum);
    const auto before = whole_parameters(model.handle);
    backward(
        squares(model.handle.forward(here(at::zeros({2, kWidth})))));  // all gradients are zero
    optimizer->step();
    const auto after = whole_parameters(model.handle);
    EXPECT_TRUE(same_bits(after.at("scale"), before.at("scale")));
    EXPECT_TRUE(at::allclose(after.at("block0.a"), before.at("block0.a") * 0.75, 1e-6, 0));
  }
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  auto misspelt = sgd(0.5);
  misspelt.no_decay = {"scales"};
  EXPECT_THAT(thrown_by([&] { make_sgd(model.handle, misspelt); }), Says("scales"));
}

// The contract's decision and the optimizer's own list are the same to the update.
TEST_P_ON_RANKS(OptimOnRanks, NoDecayOfTheContractIsFollowed, GetParam()) {
  PrecisionPolicy policy;
  policy.optimizer.no_decay = {"b"};
  auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world), policy);
  const auto optimizer = make_adamw(handle, adamw(0.5, 0.5));
  const auto before = whole_parameters(handle);
  backward(squares(handle.forward(here(at::zeros({2, kWidth})))));  // all gradients are zero
  optimizer->step();
  const auto after = whole_parameters(handle);
  EXPECT_TRUE(same_bits(after.at("b"), before.at("b")));
  EXPECT_TRUE(at::allclose(after.at("a"), before.at("a") * 0.75, 1e-6, 0));
}

// Gradients are zero: a value becomes (1 - lr x lr_scale x decay) of itself.
TEST_P_ON_RANKS(OptimOnRanks, RulesScaleLrAndDecayOverNoDecayAndTheLastMatchWins, GetParam()) {
  for (const bool adam : {false, true}) {
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    auto with_momentum = sgd(0.5, 0.0, 0.5);
    auto adaptive = adamw(0.5, 0.5);
    with_momentum.no_decay = adaptive.no_decay = {"scale"};
    with_momentum.rules = adaptive.rules = {{{"block0"}, 1.5, std::nullopt},
                                            {{"scale", "block0.b"}, std::nullopt, 1.0},
                                            {{"block0.b"}, 0.5, std::nullopt}};
    const auto optimizer =
        adam ? make_adamw(model.handle, adaptive) : make_sgd(model.handle, with_momentum);
    const auto before = whole_parameters(model.handle);
    backward(squares(model.handle.forward(here(at::zeros({2, kWidth})))));
    optimizer->step();
    const auto after = whole_parameters(model.handle);
    const std::map<std::string, double> factors{
        {"scale", 0.5}, {"block0.a", 0.625}, {"block0.b", 0.75}};
    for (const auto& [name, factor] : factors) {
      EXPECT_TRUE(at::allclose(after.at(name), before.at(name) * factor, 1e-6, 0)) << name;
    }
  }
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  const auto refusal = [&](const OptimizerRule& rule) {
    auto options = adamw(0.5);
    options.rules = {rule};
    return thrown_by([&] { make_adamw(model.handle, options); });
  };
  EXPECT_THAT(refusal({{"scale", "scales"}, 0.5, std::nullopt}),
              Says("optimizer.rule[1].match: found the pattern \"scales\""));
  EXPECT_THAT(refusal({{"scale"}, std::nullopt, std::nullopt}), Says("a pattern alone"));
  EXPECT_THAT(refusal({{"scale"}, -1.0, std::nullopt}), Says("lr_scale: found -1"));
}

TEST_P_ON_RANKS(OptimOnRanks, AGradientOfAnotherDtypeThanTheShardIsRefused, GetParam()) {
  PrecisionPolicy policy;
  policy.final_dtype = DType::kBFloat16;
  auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world), policy);
  const auto optimizer = make_sgd(handle, {});
  backward(squares(handle.forward(input_of(0, 0, kWidth))));
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("final_dtype"));
}

// ------------------------------------------------------------------------------------ norm and
// clip

double plain_norm(const Tensors& gradients) {
  double sum = 0;
  for (const auto& [name, gradient] : gradients)
    sum += gradient.to(at::kDouble).pow(2).sum().item<double>();
  return std::sqrt(sum);
}

// Naive: a scheduler that sets a copy of the learning rate changes nothing that is stepped.
TEST_P_ON_RANKS(OptimOnRanks, SchedulersOfPyTorchSetTheLearningRate, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  Chain plain(1, 2, kWidth);
  const auto ours = make_sgd(model.handle, sgd(0.0625));
  torch::optim::SGD theirs(plain.parameters(), torch::optim::SGDOptions(0.0625));
  torch::optim::StepLR scheduler(*ours, 2, 0.25);
  torch::optim::StepLR reference(theirs, 2, 0.25);
  std::vector<double> rates;
  train_both(
      world, model, plain, *ours, [&] { theirs.step(); },
      [&] {
        for (const auto& [name, value] : whole_parameters(model.handle)) {
          EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name].detach(), 1e-6, 1e-7))
              << name << " after " << rates.size();
        }
        scheduler.step();
        reference.step();
        rates.push_back(ours->lr());
        EXPECT_EQ(ours->lr(), theirs.param_groups()[0].options().get_lr());
      });
  EXPECT_EQ(rates, (std::vector<double>{0x1p-4, 0x1p-4, 0x1p-6, 0x1p-6, 0x1p-8}));
}

TEST_ON_RANKS(Optim, WhatSchedulersSeeIsTheOptimizerItself, 1) {
  ShardedChain model(data_mesh(world), 1, 1, kWidth);
  const auto ours = make_adamw(model.handle, adamw(0.5));
  torch::optim::Optimizer& seen = *ours;
  EXPECT_EQ(&seen, &static_cast<torch::optim::Optimizer&>(*ours)) << "one and the same";
  ours->set_lr(0.25);
  EXPECT_EQ(seen.param_groups()[0].options().get_lr(), 0.25);
  for (const double no_rate : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(ours->set_lr(no_rate), Error);
    EXPECT_THROW(seen.param_groups()[0].options().set_lr(no_rate), Error);
  }
  using Plateau = torch::optim::ReduceLROnPlateauScheduler;
  Plateau plateau(*ours, Plateau::min, 0.5, /*patience=*/0, /*threshold=*/1e-4);
  for (const float loss : {1.0F, 2.0F}) plateau.step(loss);
  EXPECT_EQ(ours->lr(), 0.125);
  const auto before = whole_parameters(model.handle).at("scale");
  const auto loss = seen.step([&] {
    const auto value = squares(model.handle.forward(input_of(0, 0, kWidth)));
    backward(value);
    return value;
  });
  EXPECT_TRUE(loss.defined());
  EXPECT_FALSE(same_bits(whole_parameters(model.handle).at("scale"), before));
}

class Meshes : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Meshes,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 1), std::pair(2, 2), std::pair(4, 2)));

// Naive: padding counted, replicas counted twice, fp32 sums of squares.
TEST_P_ON_RANKS(Meshes, NormCountsEveryElementOnceAndIsTheSameOnEveryRank, GetParam().first) {
  const auto replicas = GetParam().second;
  auto chain = std::make_shared<Chain>(1, 3, kWidth);
  chain->shard_blocks(data_mesh(world, replicas));
  auto handle = fully_shard(chain, data_mesh(world, replicas));
  backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
  const auto expected = plain_norm(whole_gradients(handle));
  const auto norm = gradient_norm(handle);
  EXPECT_NEAR(norm, expected, 1e-12 * expected);  // fp64 sums in another order
  auto all = at::full({1}, norm, at::kDouble);
  comm::all_reduce(world.control(), all, "norms");
  EXPECT_EQ(all.item<double>(), norm * world.size());
  EXPECT_EQ(clip_grad_norm(handle, 0.0), norm) << "0 only measures";
  EXPECT_EQ(gradient_norm(handle), norm);
  EXPECT_EQ(clip_grad_norm(handle, norm * 2), norm) << "below the limit";
  EXPECT_EQ(gradient_norm(handle), norm);
  EXPECT_EQ(clip_grad_norm(handle, norm / 4), norm);
  EXPECT_NEAR(gradient_norm(handle), norm / 4, 1e-6 * norm);
}

TEST_ON_RANKS(Norm, LargeValuesDoNotOverflowAndSmallOnesAreNotLost, 2) {
  auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({64 * 3}))), data_mesh(world), {},
                            undivided());
  auto x = here(at::full({64 * 3}, 1.0F));
  x[0] = 1e25F;
  backward((handle.forward(x)).sum() * (world.rank() == 0 ? 1.0 : 0.0));
  EXPECT_NEAR(gradient_norm(handle), 1e25, 1e19);
  handle.zero_grad();
  x[0] = 65536.0F;  // its square swallows 1 in fp32
  backward((handle.forward(x)).sum() * (world.rank() == 0 ? 1.0 : 0.0));
  EXPECT_DOUBLE_EQ(gradient_norm(handle), std::sqrt(65536.0 * 65536.0 + 191.0));
}

TEST_ON_RANKS(Norm, WhatIsNotFiniteIsNamedOnEveryRankAndScalesNothing, 3) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_TRUE(nonfinite_parameters(model.handle, 4).empty());
  for (const auto& view : model.handle.shards()) {
    // Element 40 of block1.b lies on one rank.
    if (view.contract->name == "block1.b" && view.begin <= 40 && 40 < view.end) {
      view.shard.mutable_grad()[40 - view.begin] = std::numeric_limits<float>::infinity();
    }
  }
  const auto before = model.handle.shards()[0].shard.grad().clone();
  EXPECT_FALSE(std::isfinite(clip_grad_norm(model.handle, 1.0)));
  EXPECT_TRUE(same_bits(model.handle.shards()[0].shard.grad(), before));
  EXPECT_THAT(nonfinite_parameters(model.handle, 4), ElementsAre("block1.b"));
}

// Naive: torch's own add_param_group takes the parameters, and they are never stepped.
TEST(Optim, AGroupThatIsAddedIsRefusedByNameAtTheNextStep) {
  for (const bool adam : {true, false}) {
    for (const bool as_group : {true, false}) {
      const auto errors = errors_of(2, [&](World& world) {
        auto handle = fully_shard(std::make_shared<Affine>(1, 4, 4), data_mesh(world));
        const auto before = whole_parameters(handle);
        const auto optimizer = adam ? make_adamw(handle, {}) : make_sgd(handle, {});
        torch::optim::Optimizer& torchs = *optimizer;
        const auto plain = here(at::ones({3})).requires_grad_(true);
        if (as_group) {
          torchs.add_param_group(torch::optim::OptimizerParamGroup({plain}));
        } else {
          torchs.param_groups().front().params().push_back(plain);
        }
        backward(squares(handle.forward(input_of(world.rank(), 0, 4))));
        const auto said = thrown_by([&] { torchs.step(); });
        EXPECT_EQ(thrown_by([&] { optimizer->step(); }), said) << "whichever way it is called";
        expect_same(whole_parameters(handle), before, "nothing was stepped");
        if (as_group) torchs.param_groups().pop_back();
        torchs.param_groups().front().params().clear();
        optimizer->step();
        throw std::runtime_error(said);
      });
      for (const auto& error : errors) {
        EXPECT_THAT(error, Says(as_group ? "found 2 parameter group(s) with 1 parameter(s), by "
                                           "add_param_group()"
                                         : "found 1 parameter group(s) with 1 parameter(s)",
                                "make an optimizer for each inner handle"));
      }
    }
  }
}

// Naive: mutable_grad() takes any tensor, and the step reads memory that is not the gradient's.
TEST_ON_RANKS(Optim, AGradientOfAnotherShapeIsRefusedByName, 2) {
  auto handle = fully_shard(std::make_shared<Affine>(1, 12, 16), data_mesh(world));
  const auto before = whole_parameters(handle);
  for (const bool adam : {true, false}) {
    const auto optimizer = adam ? make_adamw(handle, {}) : make_sgd(handle, {});
    const auto shard = handle.shards()[0].shard;  // of 128 and of 64 of the 192 elements
    const auto refused = [&](const at::Tensor& gradient) {
      shard.mutable_grad() = gradient;
      return thrown_by([&] { optimizer->step(); });
    };
    const auto numel = shard.numel();
    EXPECT_THAT(refused(here(at::ones({numel + 1}))),
                Says(concat("gradient of weight: found the shape [", numel + 1,
                            "] with strides [1], expected [", numel, "] as its shard")));
    EXPECT_THAT(refused(here(at::ones({numel - 1}))), Says(concat("the shape [", numel - 1, "]")));
    EXPECT_THAT(refused(here(at::ones({1})).expand({numel})), Says("with strides [0]"));
    handle.zero_grad();
  }
  expect_same(whole_parameters(handle), before, "nothing was stepped");
}

// Naive: parameters before the one that is refused have counted the step that was not made, and
// AdamW corrects its bias for one too many when it is made.
TEST_ON_RANKS(Optim, AStepThatWasRefusedIsNotCounted, 2) {
  auto handle = fully_shard(std::make_shared<Affine>(1, 12, 16), data_mesh(world));
  auto plain = fully_shard(std::make_shared<Affine>(1, 12, 16), data_mesh(world));
  const auto optimizer = make_adamw(handle, {}), expected = make_adamw(plain, {});
  const auto shards = handle.shards(), plain_shards = plain.shards();
  ASSERT_GT(shards.size(), 1U);
  for (int step = 0; step < 2; ++step) {
    for (const auto* all : {&shards, &plain_shards}) {
      for (const auto& view : *all) {
        view.shard.mutable_grad() = at::full_like(view.shard.detach(), step - 0.25);
      }
    }
    const auto& last = shards.back().shard;
    const auto right = last.grad();
    last.mutable_grad() = here(at::ones({last.numel() + 1}));
    EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("as its shard, and contiguous"));
    last.mutable_grad() = right;
    optimizer->step();
    expected->step();
  }
  expect_same(whole_parameters(handle), whole_parameters(plain), "two steps of each");
  for (const auto& state : optimizer->state()) EXPECT_EQ(state.steps, 2);
  handle.zero_grad();
  plain.zero_grad();
}

// These properties check a configuration before there is an optimizer. Naive: a column of
// optimizers.def that its class does not keep to.
TEST_ON_RANKS(OptimizerRows, SayOfEachWhatItSaysOfItself, 1) {
  const auto handle = fully_shard(std::make_shared<Affine>(1, 12, 16), data_mesh(world));
  const auto expect_alike = [&](fsdp::OptimizerName name) {
    for (const double momentum : {0.0, 0.9}) {
      fsdp::Hyperparameters values;
      values.momentum = momentum;
      const auto optimizer = fsdp::make_optimizer(name, handle, 0.1, values);
      EXPECT_EQ(optimizer->name(), fsdp::name_of(name));
      std::size_t most = 0;  // of its matrix and its vector
      for (const auto& view : handle.shards()) {
        most = std::max(most, optimizer->states_of(*view.contract).size());
      }
      EXPECT_EQ(most, static_cast<std::size_t>(fsdp::kept_states(name, values)))
          << optimizer->name() << ", momentum " << momentum;
    }
  };
#define TESSERA_OPTIMIZER(enumerator, ...) expect_alike(fsdp::OptimizerName::enumerator);
#include "fsdp/optim/optimizers.def"
#include "support/test.h"
}

}  // namespace
}  // namespace tessera::test::fsdp_optim_test
