// Optimizers, norm and clip over shards: PyTorch's numbers on the whole model, whatever the layout.
#include <gmock/gmock.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "dist/plain.h"
#include "fsdp/split_master.h"
#include "fsdp/unit.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kWidth = 7;
constexpr int kSteps = 5;

class OptimOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OptimOnRanks, ::testing::Values(1, 2, 3, 4));

/// Steps both with the same gradients; the plain module's are those that the sharded one found.
template <class Step>
void train_beside(World& world, ShardedChain& model, Chain& plain, Optimizer& ours,
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

TEST_P(OptimOnRanks, SgdWithMomentumAndDecayIsPyTorchsWithinRounding) {
  ranks(GetParam()).run([](World& world) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    Chain plain(1, 2, kWidth);
    const auto ours = make_sgd(model.handle, sgd(0.05, 0.9, 0.1));
    torch::optim::SGD theirs(plain.parameters(),
                             torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
    train_beside(
        world, model, plain, *ours, [&] { theirs.step(); },
        [&] {
          for (const auto& [name, value] : whole_parameters(model.handle)) {
            // Decay, momentum and step are three roundings each; vector and scalar loops may fuse
            // them differently.
            EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name].detach(), 1e-6, 1e-7))
                << name;
          }
        });
  });
}

TEST_P(OptimOnRanks, AdamWIsPyTorchsWithinRounding) {
  ranks(GetParam()).run([](World& world) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    Chain plain(1, 2, kWidth);
    AdamWOptions options;
    options.lr = 0.01;
    const auto ours = make_adamw(model.handle, options);
    torch::optim::AdamW theirs(plain.parameters(), torch::optim::AdamWOptions(0.01)
                                                       .betas({options.beta1, options.beta2})
                                                       .eps(options.eps)
                                                       .weight_decay(options.weight_decay));
    train_beside(
        world, model, plain, *ours, [&] { theirs.step(); },
        [&] {
          for (const auto& [name, value] : whole_parameters(model.handle)) {
            // The fused kernel divides in another order: a few units in the last place a step.
            EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name].detach(), 1e-5, 1e-6))
                << name;
          }
        });
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
      ShardOptions options;
      options.divide_factor = 1.0;
      auto handle =
          fully_shard(std::make_shared<Chain>(1, 2, kWidth), data_mesh(world), {}, options);
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
          EXPECT_TRUE(at::allclose(found.at(name), value, 1e-6, 1e-7)) << count << " " << name;
        }
      }
    });
  }
}

TEST_P(OptimOnRanks, WhatNoDecayNamesIsNotDecayedAndAMisspeltNameIsRefused) {
  ranks(GetParam()).run([](World& world) {
    for (const bool adam : {false, true}) {
      ShardedChain model(data_mesh(world), 1, 1, kWidth);
      auto with_momentum = sgd(0.5, 0.0, 0.5);
      auto adaptive = adamw(0.5, 0.5);
      with_momentum.no_decay = adaptive.no_decay = {"scale"};
      const auto optimizer =
          adam ? make_adamw(model.handle, adaptive) : make_sgd(model.handle, with_momentum);
      const auto before = whole_parameters(model.handle);
      backward(squares(model.handle.forward(at::zeros({2, kWidth}))));  // all gradients are zero
      optimizer->step();
      const auto after = whole_parameters(model.handle);
      EXPECT_TRUE(same_bits(after.at("scale"), before.at("scale")));
      EXPECT_TRUE(at::allclose(after.at("block0.a"), before.at("block0.a") * 0.75, 1e-6, 0));
    }
    ShardedChain model(data_mesh(world), 1, 1, kWidth);
    auto misspelt = sgd(0.5);
    misspelt.no_decay = {"scales"};
    EXPECT_THAT(error_of([&] { make_sgd(model.handle, misspelt); }), HasSubstr("scales"));
  });
}

// ---------------------------------------------------------------------------------- 16-bit shards

/// A parameter w in `storage` whose gradient is 1 everywhere.
Sharded<Scale> ones(World& world, DType storage, std::optional<DType> final = std::nullopt) {
  PrecisionPolicy policy;
  policy.final_dtype = final;
  policy.loss_scaling = true;  // float16 computes here with gradients of 1
  ShardOptions options;
  options.divide_factor = world.size();
  const auto dtype = storage == DType::kFloat16 ? at::kHalf : at::kBFloat16;
  return fully_shard(std::make_shared<Scale>(at::ones({kWidth}, dtype)), data_mesh(world), policy,
                     options);
}

// Naive: moments and steps in the dtype of the shard: 1 - 0.001 is 1 in bf16, for ever.
TEST_P(OptimOnRanks, AdamWAddsUpUpdatesBelowAStepOfA16BitShard) {
  ranks(GetParam()).run([](World& world) {
    for (const auto storage : {DType::kBFloat16, DType::kFloat16}) {
      for (const auto final : {std::optional<DType>(), std::optional(storage)}) {
        auto handle = ones(world, storage, final);
        const auto optimizer = make_adamw(handle, adamw(1e-4, 0.0));
        for (int step = 0; step < 40; ++step) {
          handle.zero_grad();
          backward(handle.forward(at::ones({kWidth})).sum());
          optimizer->step();
        }
        // A constant gradient moves by lr a step: 0.996, one or more steps below 1 in both dtypes.
        const auto value = whole_parameters(handle).at("weight");
        EXPECT_TRUE(same_bits(value, at::full({kWidth}, 1.0 - 40 * 1e-4).to(value.scalar_type())));
      }
    }
  });
}

// Naive: gradients rounded to the shard's dtype before the moments, moments rounded each step.
TEST_P(OptimOnRanks, AdamWOnA16BitShardIsTheRoundedFp32One) {
  ranks(GetParam()).run([](World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = DType::kBFloat16;
    auto handle =
        fully_shard(std::make_shared<Block>(1, kWidth, at::kBFloat16), data_mesh(world), policy);
    const auto options = adamw(0.01);
    const auto optimizer = make_adamw(handle, options);
    Tensors masters;
    for (const auto& [name, value] : whole_parameters(handle)) masters[name] = value.to(at::kFloat);
    std::vector<at::Tensor> whole;
    for (const auto& [name, master] : masters) whole.push_back(master);
    torch::optim::AdamW theirs(whole, torch::optim::AdamWOptions(0.01)
                                          .betas({options.beta1, options.beta2})
                                          .eps(options.eps)
                                          .weight_decay(options.weight_decay));
    for (int step = 0; step < kSteps; ++step) {
      handle.zero_grad();
      backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
      for (const auto& [name, gradient] : whole_gradients(handle))
        masters.at(name).mutable_grad() = gradient.to(at::kFloat);
      optimizer->step();
      theirs.step();
      for (const auto& [name, value] : whole_parameters(handle)) {
        EXPECT_EQ(value.scalar_type(), at::kBFloat16);
        // The masters agree to a few units in the last place; the shard may be the other neighbour.
        EXPECT_TRUE(at::allclose(value.to(at::kFloat), masters.at(name), 1.0 / 255, 1e-6)) << name;
      }
    }
  });
}

/// Ten updates of 1e-3, after the first of which somebody else sets element 0 to 2.
at::Tensor after_a_foreign_write(World& world, DType storage) {
  auto handle = ones(world, storage);
  const auto optimizer = make_adamw(handle, adamw(1e-3, 0.0));
  for (int step = 0; step < 10; ++step) {
    handle.zero_grad();
    backward(handle.forward(at::ones({kWidth})).sum());
    optimizer->step();
    if (step > 0) continue;
    const at::NoGradGuard no_grad;
    const auto view = handle.shards()[0];
    if (view.begin == 0 && view.end > 0) view.shard[0].fill_(2.0);
  }
  return whole_parameters(handle).at("weight");
}

// Naive: the next step writes the master over what was loaded; or the whole master is read back
// rounded, and small updates of the others are lost.
TEST_P(OptimOnRanks, AChangedElementOfAFloat16ShardIsTakenOverAndTheOthersKeepTheirMaster) {
  ranks(GetParam()).run([](World& world) {
    auto expected = at::full({kWidth}, 1.0 - 10 * 1e-3);
    expected[0] = 2.0 - 9 * 1e-3;
    EXPECT_TRUE(same_bits(after_a_foreign_write(world, DType::kFloat16), expected.to(at::kHalf)));
  });
}

// Naive: what was written is joined with bits of another value, and 2 is not quite 2.
TEST_P(OptimOnRanks, ABFloat16ShardThatSomebodyElseWroteGoesOnFromItsSixteenBits) {
  ranks(GetParam()).run([](World& world) {
    // On the rank that wrote, 1 - 1e-3 had been rounded to 1 and its rest is dropped.
    const auto found = after_a_foreign_write(world, DType::kBFloat16);
    EXPECT_TRUE(same_bits(found[0], at::full({}, 2.0 - 9 * 1e-3).to(at::kBFloat16)));
  });
}

// Naive: the remainder is kept but not used, or rounds otherwise than it is joined.
TEST_P(OptimOnRanks, ABFloat16ShardAndItsRemainderAreFloat32StorageToTheBit) {
  ranks(GetParam()).run([](World& world) {
    constexpr int kLongRun = 200;
    for (const double lr : {1e-5, 1e-3, 0.1}) {
      for (const bool adam : {true, false}) {
        const auto make = [&](at::ScalarType storage, Rounding rounding) {
          PrecisionPolicy policy;
          policy.param_dtype = DType::kBFloat16;
          policy.param_rounding = rounding;
          // Both begin with what bf16 holds.
          auto block = std::make_shared<Block>(1, kWidth, at::kBFloat16);
          for (auto& parameter : block->parameters()) parameter.set_data(parameter.to(storage));
          return fully_shard(block, data_mesh(world), policy);
        };
        auto wide = make(at::kFloat, Rounding::kHalfAway);
        auto narrow = make(at::kBFloat16, Rounding::kNearestEven);
        const auto optimizer_of = [&](const ShardedBase& model) {
          return adam ? make_adamw(model, adamw(lr)) : make_sgd(model, sgd(lr, 0.9, 0.1));
        };
        const auto of_wide = optimizer_of(wide);
        const auto of_narrow = optimizer_of(narrow);
        for (int step = 0; step < kLongRun; ++step) {
          const auto x = input_of(world.rank(), step % kSteps, kWidth).to(at::kBFloat16);
          for (auto* model : {&wide, &narrow}) {
            model->zero_grad();
            backward(squares(model->forward(x)) / 64);
            clip_grad_norm(*model, 1.0);
          }
          of_wide->step();
          of_narrow->step();
        }
        const auto states = of_narrow->state();
        const auto shards = wide.shards();
        for (std::size_t i = 0; i < shards.size(); ++i) {
          const auto& name = shards[i].contract->name;
          ASSERT_EQ(states[i].kept.back().name, "master_remainder");
          const auto& remainder = states[i].kept.back().values;
          auto joined = at::empty(remainder.sizes(), at::kFloat);
          fsdp::join_master(states[i].view.shard.detach(), remainder, joined);
          EXPECT_TRUE(same_bits(joined, shards[i].shard.detach())) << name << " lr " << lr;
          EXPECT_TRUE(joined.isfinite().all().item<bool>()) << name;
        }
      }
    }
  });
}

// 1 + 2^-8 lies halfway between two neighbours in bf16: 1, which is even, and 1 + 2^-7.
TEST_P(OptimOnRanks, HalvesOfFloat32StorageAreRoundedAsThePolicySays) {
  ranks(GetParam()).run([](World& world) {
    for (const auto rounding : {Rounding::kNearestEven, Rounding::kHalfAway}) {
      PrecisionPolicy policy;
      policy.param_dtype = DType::kBFloat16;
      policy.param_rounding = rounding;
      auto handle = fully_shard(std::make_shared<Scale>(at::full({kWidth}, 1.0F + 0x1p-8F)),
                                data_mesh(world), policy);
      const auto seen = handle.forward(at::ones({kWidth})).detach();
      const double expected = rounding == Rounding::kHalfAway ? 1.0 + 0x1p-7 : 1.0;
      EXPECT_TRUE(same_bits(seen, at::full({kWidth}, expected).to(at::kBFloat16)));
    }
  });
}

// Naive: parts that begin at odd places give other bits than one call over the whole shard.
TEST(Masters, AShardOfSeveralPartsIsSteppedAsOne) {
  ranks(1).run([](World& world) {
    const std::int64_t size = 2 * fsdp::kMasterPart + 12345;
    const auto make = [&](at::ScalarType storage, Rounding rounding) {
      PrecisionPolicy policy;
      policy.param_dtype = DType::kBFloat16;
      policy.param_rounding = rounding;
      const auto weight = seeded(3, {size}).to(at::kBFloat16).to(storage);
      return fully_shard(std::make_shared<Scale>(weight), data_mesh(world), policy);
    };
    auto wide = make(at::kFloat, Rounding::kHalfAway);
    auto narrow = make(at::kBFloat16, Rounding::kNearestEven);
    const auto of_wide = make_adamw(wide, adamw(1e-3));
    const auto of_narrow = make_adamw(narrow, adamw(1e-3));
    const auto x = seeded(4, {size}).to(at::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      for (auto* model : {&wide, &narrow}) {
        model->zero_grad();
        backward(model->forward(x).sum());
      }
      of_wide->step();
      of_narrow->step();
    }
    const auto state = of_narrow->state().front();
    auto joined = at::empty({size}, at::kFloat);
    fsdp::join_master(state.view.shard.detach(), state.kept.back().values, joined);
    EXPECT_TRUE(same_bits(joined, wide.shards().front().shard.detach()));
  });
}

// Naive: SGD silently loses updates of a 16-bit shard whose contract promises a master.
TEST_P(OptimOnRanks, SgdAddsUpUpdatesBelowAStepOfA16BitShard) {
  ranks(GetParam()).run([](World& world) {
    for (const auto storage : {DType::kBFloat16, DType::kFloat16}) {
      auto handle = ones(world, storage);
      const auto optimizer = make_sgd(handle, sgd(1e-4));
      for (int step = 0; step < 40; ++step) {
        handle.zero_grad();
        backward(handle.forward(at::ones({kWidth})).sum());
        optimizer->step();
      }
      const auto value = whole_parameters(handle).at("weight");
      EXPECT_TRUE(same_bits(value, at::full({kWidth}, 1.0 - 40 * 1e-4).to(value.scalar_type())));
    }
  });
}

// Only who asks for it loses them, as with torch.optim.
TEST_P(OptimOnRanks, WithoutAMasterTheShardItselfIsSteppedInItsSixteenBits) {
  ranks(GetParam()).run([](World& world) {
    for (const bool adam : {true, false}) {
      auto handle = fully_shard(std::make_shared<Scale>(at::ones({kWidth}, at::kBFloat16)),
                                data_mesh(world), without_master());
      const auto optimizer = adam ? make_adamw(handle, adamw(1e-4, 0.0)) : make_sgd(handle, sgd(1e-4));
      for (int step = 0; step < 5; ++step) {
        handle.zero_grad();
        backward(handle.forward(at::ones({kWidth}, at::kBFloat16)).sum());
        optimizer->step();
      }
      EXPECT_TRUE(same_bits(whole_parameters(handle).at("weight"), at::ones({kWidth}, at::kBFloat16)));
      for (const auto& state : optimizer->state()) {
        for (const auto& kept : state.kept) {
          EXPECT_EQ(kept.values.scalar_type(), at::kBFloat16) << kept.name;
        }
      }
    }
  });
}

TEST_P(OptimOnRanks, The16BitShardWithAMasterGetsFloat32GradientsByDefault) {
  ranks(GetParam()).run([](World& world) {
    auto handle = ones(world, DType::kBFloat16);
    // 1 + 2^-10 has no bfloat16: it reaches the optimizer unrounded.
    backward((handle.forward(at::ones({kWidth})) * (1.0 + 1.0 / 1024)).sum());
    EXPECT_TRUE(
        same_bits(whole_gradients(handle).at("weight"), at::full({kWidth}, 1.0F + 1.0F / 1024)));
  });
}

// The contract's decision and the optimizer's own list are the same to the update.
TEST_P(OptimOnRanks, NoDecayOfTheContractIsFollowed) {
  ranks(GetParam()).run([](World& world) {
    PrecisionPolicy policy;
    policy.optimizer.no_decay = {"b"};
    auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world), policy);
    const auto optimizer = make_adamw(handle, adamw(0.5, 0.5));
    const auto before = whole_parameters(handle);
    backward(squares(handle.forward(at::zeros({2, kWidth}))));  // all gradients are zero
    optimizer->step();
    const auto after = whole_parameters(handle);
    EXPECT_TRUE(same_bits(after.at("b"), before.at("b")));
    EXPECT_TRUE(at::allclose(after.at("a"), before.at("a") * 0.75, 1e-6, 0));
  });
}

TEST_P(OptimOnRanks, AGradientOfAnotherDtypeThanTheShardIsRefused) {
  ranks(GetParam()).run([](World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = DType::kBFloat16;
    auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world), policy);
    const auto optimizer = make_sgd(handle, {});
    backward(squares(handle.forward(input_of(0, 0, kWidth))));
    EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("final_dtype"));
  });
}

// ------------------------------------------------------------------------------------ norm and
// clip

double plain_norm(const Tensors& gradients) {
  double sum = 0;
  for (const auto& [name, gradient] : gradients)
    sum += gradient.to(at::kDouble).pow(2).sum().item<double>();
  return std::sqrt(sum);
}

class Meshes : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Meshes,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 1), std::pair(2, 2), std::pair(4, 2)));

// Naive: padding counted, replicas counted twice, fp32 sums of squares.
TEST_P(Meshes, NormCountsEveryElementOnceAndIsTheSameOnEveryRank) {
  const auto [count, replicas] = GetParam();
  ranks(count).run([replicas](World& world) {
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
  });
}

TEST(Norm, LargeValuesDoNotOverflowAndSmallOnesAreNotLost) {
  ranks(2).run([](World& world) {
    ShardOptions options;
    options.divide_factor = 1.0;
    auto handle =
        fully_shard(std::make_shared<Scale>(at::ones({64 * 3})), data_mesh(world), {}, options);
    auto x = at::full({64 * 3}, 1.0F);
    x[0] = 1e25F;
    backward((handle.forward(x)).sum() * (world.rank() == 0 ? 1.0 : 0.0));
    EXPECT_NEAR(gradient_norm(handle), 1e25, 1e19);
    handle.zero_grad();
    x[0] = 65536.0F;  // its square swallows 1 in fp32
    backward((handle.forward(x)).sum() * (world.rank() == 0 ? 1.0 : 0.0));
    EXPECT_DOUBLE_EQ(gradient_norm(handle), std::sqrt(65536.0 * 65536.0 + 191.0));
  });
}

TEST(Norm, WhatIsNotFiniteIsNamedOnEveryRankAndScalesNothing) {
  ranks(3).run([](World& world) {
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
    EXPECT_THAT(nonfinite_parameters(model.handle, 4), ::testing::ElementsAre("block1.b"));
  });
}

}  // namespace
}  // namespace tessera::test
