// Shards in 16 bits: what optimizers keep in addition, and what is lost only where it is asked for.
#include <torch/optim/adamw.h>

#include "fsdp/optim/optimizer_shards.h"
#include "fsdp/runtime/unit.h"
#include "kernels/kernels.h"
#include "proof.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_narrow_shards_test {
namespace {

constexpr std::int64_t kWidth = 7;
constexpr int kSteps = 5;

class NarrowShards : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, NarrowShards, ::testing::Values(1, 2, 3, 4));

/// A parameter w in `storage` whose gradient is 1 everywhere.
Sharded<Scale> ones(World& world, DType storage, std::optional<DType> final = std::nullopt) {
  PrecisionPolicy policy;
  policy.final_dtype = final;
  policy.loss_scaling = true;  // float16 computes here with gradients of 1
  ShardOptions options;
  options.divide_factor = world.size();
  const auto dtype = storage == DType::kFloat16 ? at::kHalf : at::kBFloat16;
  return fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}, dtype))), data_mesh(world),
                     policy, options);
}

/// Takes 40 steps with lr 1e-4. A constant gradient moves by lr a step: 0.996, one or more steps
/// below 1 in both dtypes.
void expect_steps_add_up(Sharded<Scale>& handle, Optimizer& optimizer) {
  for (int step = 0; step < 40; ++step) {
    handle.zero_grad();
    backward(handle.forward(here(at::ones({kWidth}))).sum());
    optimizer.step();
  }
  const auto value = whole_parameters(handle).at("weight");
  EXPECT_TRUE(same_bits(value, here(at::full({kWidth}, 1.0 - 40 * 1e-4)).to(value.scalar_type())));
}

// Naive: moments and steps in the dtype of the shard: 1 - 0.001 is 1 in bf16, for ever.
TEST_P_ON_RANKS(NarrowShards, AdamWAddsUpUpdatesBelowAStepOfA16BitShard, GetParam()) {
  for (const auto storage : {DType::kBFloat16, DType::kFloat16}) {
    for (const auto final : {std::optional<DType>(), std::optional(storage)}) {
      auto handle = ones(world, storage, final);
      const auto optimizer = make_adamw(handle, adamw(1e-4, 0.0));
      expect_steps_add_up(handle, *optimizer);
    }
  }
}

// Naive: gradients rounded to the shard's dtype before the moments, moments rounded each step.
TEST_P_ON_RANKS(NarrowShards, AdamWOnA16BitShardIsTheRoundedFp32One, GetParam()) {
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
}

/// Ten updates of 1e-3, after the first of which somebody else sets element 0 to 2.
at::Tensor after_a_foreign_write(World& world, DType storage) {
  auto handle = ones(world, storage);
  const auto optimizer = make_adamw(handle, adamw(1e-3, 0.0));
  for (int step = 0; step < 10; ++step) {
    handle.zero_grad();
    backward(handle.forward(here(at::ones({kWidth}))).sum());
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
TEST_P_ON_RANKS(NarrowShards, AChangedElementOfAFloat16ShardIsTakenOverAndTheOthersKeepTheirMaster,
                GetParam()) {
  auto expected = here(at::full({kWidth}, 1.0 - 10 * 1e-3));
  expected[0] = 2.0 - 9 * 1e-3;
  EXPECT_TRUE(same_bits(after_a_foreign_write(world, DType::kFloat16), expected.to(at::kHalf)));
}

// Naive: what was written is joined with bits of another value, and 2 is not quite 2.
TEST_P_ON_RANKS(NarrowShards, ABFloat16ShardThatSomebodyElseWroteResumesFromItsSixteenBits,
                GetParam()) {
  // On the rank that wrote, 1 - 1e-3 had been rounded to 1 and its rest is dropped.
  const auto found = after_a_foreign_write(world, DType::kBFloat16);
  EXPECT_TRUE(same_bits(found[0], here(at::full({}, 2.0 - 9 * 1e-3)).to(at::kBFloat16)));
}

// Naive: the remainder is kept but not used, or rounds otherwise than it is joined.
TEST_P_ON_RANKS(NarrowShards, ABFloat16ShardAndItsRemainderAreFloat32StorageToTheBit, GetParam()) {
  const int steps = place().device == "cpu" || full_proof() ? 200 : 40;
  for (const double lr : {1e-5, 1e-3, 0.1}) {
    for (const bool adam : {true, false}) {
      const auto make = [&](at::ScalarType storage, Rounding rounding) {
        auto policy = in_bfloat16();
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
      for (int step = 0; step < steps; ++step) {
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
        auto joined = here(at::empty(remainder.sizes(), at::kFloat));
        kernels::join_master(states[i].view.shard.detach(), remainder, joined);
        EXPECT_TRUE(same_bits(joined, shards[i].shard.detach())) << name << " lr " << lr;
        EXPECT_TRUE(joined.isfinite().all().item<bool>()) << name;
      }
    }
  }
}

// 1 + 2^-8 lies halfway between two neighbours in bf16: 1, which is even, and 1 + 2^-7.
TEST_P_ON_RANKS(NarrowShards, HalvesOfFloat32StorageAreRoundedAsThePolicySays, GetParam()) {
  for (const auto rounding : {Rounding::kNearestEven, Rounding::kHalfAway}) {
    auto policy = in_bfloat16();
    policy.param_rounding = rounding;
    auto handle = fully_shard(std::make_shared<Scale>(here(at::full({kWidth}, 1.0F + 0x1p-8F))),
                              data_mesh(world), policy);
    const auto seen = handle.forward(here(at::ones({kWidth}))).detach();
    const double expected = rounding == Rounding::kHalfAway ? 1.0 + 0x1p-7 : 1.0;
    EXPECT_TRUE(same_bits(seen, here(at::full({kWidth}, expected)).to(at::kBFloat16)));
  }
}

// Naive: parts that begin at odd places give other bits than one call over the whole shard.
TEST_ON_RANKS(Masters, AShardOfSeveralPartsIsSteppedAsOne, 1) {
  const std::int64_t size = 2 * fsdp::kMasterPart + 12345;
  const auto make = [&](at::ScalarType storage, Rounding rounding) {
    auto policy = in_bfloat16();
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
  auto joined = here(at::empty({size}, at::kFloat));
  kernels::join_master(state.view.shard.detach(), state.kept.back().values, joined);
  EXPECT_TRUE(same_bits(joined, wide.shards().front().shard.detach()));
}

// Naive: SGD silently loses updates of a 16-bit shard whose contract promises a master.
TEST_P_ON_RANKS(NarrowShards, SgdAddsUpUpdatesBelowAStepOfA16BitShard, GetParam()) {
  for (const auto storage : {DType::kBFloat16, DType::kFloat16}) {
    auto handle = ones(world, storage);
    const auto optimizer = make_sgd(handle, sgd(1e-4));
    expect_steps_add_up(handle, *optimizer);
  }
}

// Only who asks for it loses them, as with torch.optim.
TEST_P_ON_RANKS(NarrowShards, WithoutAMasterTheShardItselfIsSteppedInItsSixteenBits, GetParam()) {
  for (const bool adam : {true, false}) {
    auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}, at::kBFloat16))),
                              data_mesh(world), without_master());
    const auto optimizer =
        adam ? make_adamw(handle, adamw(1e-4, 0.0)) : make_sgd(handle, sgd(1e-4));
    for (int step = 0; step < 5; ++step) {
      handle.zero_grad();
      backward(handle.forward(here(at::ones({kWidth}, at::kBFloat16))).sum());
      optimizer->step();
    }
    EXPECT_TRUE(
        same_bits(whole_parameters(handle).at("weight"), here(at::ones({kWidth}, at::kBFloat16))));
    for (const auto& state : optimizer->state()) {
      for (const auto& kept : state.kept) {
        EXPECT_EQ(kept.values.scalar_type(), at::kBFloat16) << kept.name;
      }
    }
  }
}

TEST_P_ON_RANKS(NarrowShards, The16BitShardWithAMasterGetsFloat32GradientsByDefault, GetParam()) {
  auto handle = ones(world, DType::kBFloat16);
  // 1 + 2^-10 has no bfloat16: it reaches the optimizer unrounded.
  backward((handle.forward(here(at::ones({kWidth}))) * (1.0 + 1.0 / 1024)).sum());
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                        here(at::full({kWidth}, 1.0F + 1.0F / 1024))));
}

}  // namespace
}  // namespace tessera::test::fsdp_narrow_shards_test
