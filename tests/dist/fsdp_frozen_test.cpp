// Frozen parameters: sharded or whole on every rank, and when backward gathers them again.

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "grad/torch_dtype.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/trainable.h"

namespace tessera::test::fsdp_frozen_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr int kBlocks = 3;

/// Bit for bit, but where the mesh has both axes: there the sum over ranks is formed in another
/// order, which is worth a step of the dtype or two.
void expect_close(const Tensors& found, const Tensors& expected, bool same_order) {
  if (same_order) return expect_same(found, expected);
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const double step = value.scalar_type() == at::kBFloat16 ? 0x1p-7 : 0x1p-22;
    EXPECT_TRUE(at::allclose(found.at(name), value, step, step)) << name;
  }
}

/// Ranks and replicas.
class FrozenOnRanks : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  static int count() { return GetParam().first; }
  static Mesh mesh(World& world) { return data_mesh(world, GetParam().second); }
  static bool one_axis() { return GetParam() != std::pair{4, 2}; }
};
INSTANTIATE_TEST_SUITE_P(Layouts, FrozenOnRanks,
                         ::testing::Values(std::pair{1, 1}, std::pair{2, 1}, std::pair{3, 1},
                                           std::pair{4, 1}, std::pair{4, 2}, std::pair{2, 2}));

PrecisionPolicy frozen(std::vector<std::string> match, FrozenRule how,
                       std::optional<DType> param_dtype = std::nullopt) {
  PrecisionPolicy policy;
  policy.param_dtype = param_dtype;
  PrecisionRule rule;
  rule.match = std::move(match);
  rule.frozen = how;
  policy.rules = {rule};
  return policy;
}

/// A chain with `a` of every block frozen, in the dtype in which a bf16 run computes it.
std::shared_ptr<Chain> plain_chain(at::ScalarType dtype) {
  auto chain = std::make_shared<Chain>(1, kBlocks, kWidth);
  for (auto& parameter : chain->parameters()) parameter.set_data(parameter.to(dtype));
  for (auto& block : chain->blocks) block->a.set_requires_grad(false);
  return chain;
}

struct Step {
  at::Tensor loss;
  Tensors gradients;
  double norm = 0;
};

Step step_of(Sharded<Chain>& handle, int rank) {
  Step step;
  step.loss = squares(handle.forward(input_of(rank, 0, kWidth)));
  backward(step.loss);
  step.gradients = whole_gradients(handle);
  step.norm = gradient_norm(handle);
  return step;
}

// Property: whole or sharded, frozen parameters give the plain module's numbers bit for bit, in
// fp32 and where they are stored in fp32 and compute in bf16.
TEST_P(FrozenOnRanks, WholeParametersTrainTheOthersAsThePlainModule) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    ranks(count()).run([&](World& world) {
      const auto plain = plain_chain(dtype);
      const auto param_dtype = dtype == at::kFloat ? std::nullopt : std::optional(DType::kBFloat16);
      const auto policy = frozen({"a"}, FrozenRule::kReplicate, param_dtype);
      auto rest = policy;
      rest.rules.clear();
      auto chain = std::make_shared<Chain>(1, kBlocks, kWidth);
      chain->shard_blocks(mesh(world), policy);
      auto handle = fully_shard(chain, mesh(world), rest);
      for (const auto& view : handle.shards()) {
        if (view.contract->name.find(".a") == std::string::npos) continue;
        EXPECT_EQ(view.end - view.begin, view.contract->numel()) << "whole on every rank";
        EXPECT_EQ(view.shard.scalar_type(), dtype) << "kept as it computes";
        EXPECT_FALSE(view.shard.requires_grad());
      }
      const auto step = step_of(handle, world.rank());
      const auto cast = [&](int rank) { return input_of(rank, 0, kWidth).to(dtype); };
      const auto expected = plain_gradients(*plain, world.size(), world.size(), [&](int rank) {
        backward(squares(plain->forward(cast(rank))));
      });
      EXPECT_TRUE(
          same_bits(step.loss.detach(), squares(plain->forward(cast(world.rank()))).detach()));
      double squared = 0;
      Tensors found;
      for (const auto& [name, gradient] : step.gradients) {
        // Masters are fp32, so gradients are: the sums of bf16 gradients are not rounded again.
        EXPECT_EQ(gradient.scalar_type(), at::kFloat);
        found[name] = gradient.to(dtype);
        squared += gradient.to(at::kDouble).pow(2).sum().item<double>();
      }
      expect_close(found, expected, one_axis());
      EXPECT_NEAR(step.norm, std::sqrt(squared), 1e-12 * step.norm) << "frozen ones do not count";
    });
  }
}

// Property: how a frozen parameter is kept changes no bit of a run.
TEST_P_ON_RANKS(FrozenOnRanks, WholeAndShardedGiveTheSameBits, count()) {
  const auto run = [&](FrozenRule how) {
    auto chain = std::make_shared<Chain>(1, kBlocks, kWidth);
    chain->shard_blocks(mesh(world), frozen({"a"}, how, DType::kBFloat16));
    auto handle = fully_shard(chain, mesh(world));
    auto step = step_of(handle, world.rank());
    step.gradients["loss"] = step.loss.detach();
    return step.gradients;
  };
  expect_same(run(FrozenRule::kReplicate), run(FrozenRule::kShard));
}

// Where the storage dtype loses digits that the compute dtype would have kept, both lose them.
// Naive: what is whole is copied past the storage dtype.
TEST_P(FrozenOnRanks, WholeAndShardedGiveTheSameBitsOfANarrowerStorage) {
  for (const auto storage : {DType::kBFloat16, DType::kFloat16}) {
    ranks(count()).run([&](World& world) {
      const auto run = [&](FrozenRule how) {
        auto policy = frozen({"a"}, how, DType::kFloat32);
        policy.rules[0].storage_dtype = storage;
        policy.on_narrower_request = NarrowerRequest::kNarrow;
        auto chain = std::make_shared<Chain>(1, kBlocks, kWidth);
        chain->shard_blocks(mesh(world), policy);
        auto handle = fully_shard(chain, mesh(world));
        auto step = step_of(handle, world.rank());
        step.gradients["loss"] = step.loss.detach();
        for (const auto& view : handle.shards()) {
          if (view.contract->trainable) continue;
          EXPECT_EQ(view.contract->compute.dtype, DType::kFloat32);
          step.gradients[view.contract->name] =
              whole_parameters(handle).at(view.contract->name).to(at::kFloat);
        }
        return step.gradients;
      };
      const auto whole = run(FrozenRule::kReplicate);
      expect_same(whole, run(FrozenRule::kShard));
      const auto values = whole.at("block0.a");
      EXPECT_TRUE(same_bits(values, values.to(to_scalar_type(storage)).to(at::kFloat)));
    });
  }
}

TEST_P_ON_RANKS(FrozenOnRanks, AWholeUnitIsNeverGathered, count()) {
  auto block = std::make_shared<Block>(5, kWidth);
  const auto expected = block->forward(here(at::ones({2, kWidth}))).detach();
  auto handle = fully_shard(block, mesh(world), frozen({"a", "b"}, FrozenRule::kReplicate));
  auto x = here(at::ones({2, kWidth})).set_requires_grad(true);
  const auto y = handle.forward(x);
  EXPECT_TRUE(same_bits(y.detach(), expected));
  backward(y.sum());
  EXPECT_TRUE(x.grad().defined()) << "gradients pass through it";
  EXPECT_EQ(handle.unit()->runtime().gathers_issued(), 0);
  expect_same(whole_parameters(handle), {{"a", block->a.detach()}, {"b", block->b.detach()}});
  EXPECT_EQ(gradient_norm(handle), 0.0);
}

// Values that come after sharding (a loader's) are rounded once, as they are written.
TEST_P_ON_RANKS(FrozenOnRanks, ValuesThatAreLoadedLaterAreCastOnTheWayIn, count()) {
  auto block = std::make_shared<Block>(5, kWidth);
  const auto a = block->a.detach().clone();
  auto handle =
      fully_shard(block, mesh(world), frozen({"a", "b"}, FrozenRule::kReplicate, DType::kBFloat16));
  const auto fine = a + 1.0 / 1024;
  for (const auto& view : handle.shards()) {
    if (view.contract->name == "a") view.shard.detach().copy_(fine.reshape({-1}));
  }
  handle.set_loaded();
  EXPECT_TRUE(same_bits(whole_parameters(handle).at("a"), fine.to(at::kBFloat16)));
  EXPECT_TRUE(same_bits(block->a.detach(), fine.to(at::kBFloat16)));
}

// Property: parameters move from slices to whole and back without changing a bit.
TEST_P_ON_RANKS(FrozenOnRanks, SetTrainableMovesThemBetweenSlicesAndWhole, count()) {
  Chain plain(1, kBlocks, kWidth);
  auto chain = std::make_shared<Chain>(1, kBlocks, kWidth);
  chain->shard_blocks(mesh(world));
  auto handle = fully_shard(chain, mesh(world));
  const auto values = whole_parameters(handle);
  for (const bool trainable : {false, true}) {
    set_trainable(handle,
                  {{.match = {"a"}, .trainable = trainable, .frozen_as = FrozenAs::kReplicate}});
    expect_same(whole_parameters(handle), values);
    for (auto& block : plain.blocks) block->a.set_requires_grad(trainable);
    const auto expected = gradients_of_squares(plain, world.size(), 0, kWidth);
    expect_close(step_of(handle, world.rank()).gradients, expected, one_axis());
    handle.zero_grad();
  }
}

/// Gathers that a forward and the backward after it issue.
struct Gathers {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
};

Gathers gathers_of(Sharded<Chain>& handle, const at::Tensor& x) {
  auto& runtime = handle.unit()->runtime();
  const auto before = runtime.gathers_issued();
  const auto loss = squares(handle.forward(x));
  const auto between = runtime.gathers_issued();
  backward(loss);
  return {between - before, runtime.gathers_issued() - between};
}

/// A chain with the blocks `numbers` frozen, and its own scale too where `data` is what they see.
struct PartlyFrozen {
  PartlyFrozen(const Mesh& mesh, const std::vector<int>& numbers, bool scale_is_frozen)
      : chain(std::make_shared<Chain>(1, kBlocks, kWidth)), plain(1, kBlocks, kWidth) {
    const auto freeze = [&](Chain& each) {
      each.scale.set_requires_grad(!scale_is_frozen);
      for (const int number : numbers) {
        auto& block = *each.blocks.at(static_cast<std::size_t>(number));
        for (auto& parameter : block.parameters()) parameter.set_requires_grad(false);
      }
    };
    freeze(*chain);
    freeze(plain);
    chain->shard_blocks(mesh);
    handle.emplace(fully_shard(chain, mesh));
  }
  void expect_gradients_of_the_plain_one(World& world, bool same_order) {
    const auto expected = gradients_of_squares(plain, world.size(), 0, kWidth);
    expect_close(whole_gradients(*handle), expected, same_order);
    handle->zero_grad();
  }
  std::shared_ptr<Chain> chain;
  Chain plain;
  std::optional<Sharded<Chain>> handle;
};

// Naive: the backward gathers every unit of the forward again, a frozen tower for nothing.
TEST_P_ON_RANKS(FrozenOnRanks, UnitsBehindTheDataAreNotGatheredAgainInBackward, count()) {
  PartlyFrozen model(mesh(world), {0, 1}, /*scale_is_frozen=*/true);
  const std::int64_t one = mesh(world).size_of(axis::kShard) > 1 ? 1 : 0;
  for (int step = 0; step < 3; ++step) {
    const auto found = gathers_of(*model.handle, input_of(world.rank(), 0, kWidth));
    EXPECT_EQ(found.forward, (kBlocks + 1) * one);
    // From the second step on the last block's memory is kept for its backward.
    EXPECT_EQ(found.backward, step == 0 ? one : 0);
    model.expect_gradients_of_the_plain_one(world, one_axis());
  }
}

// Between a trained parameter and the loss a frozen unit is needed: the gradient of its input is a
// product with its weights.
TEST_P_ON_RANKS(FrozenOnRanks, AFrozenUnitBehindATrainedOneIsGatheredAgain, count()) {
  PartlyFrozen model(mesh(world), {1}, /*scale_is_frozen=*/true);
  const std::int64_t one = mesh(world).size_of(axis::kShard) > 1 ? 1 : 0;
  for (int step = 0; step < 2; ++step) {
    const auto found = gathers_of(*model.handle, input_of(world.rank(), 0, kWidth));
    EXPECT_EQ(found.backward, (step == 0 ? kBlocks : kBlocks - 1) * one);
    model.expect_gradients_of_the_plain_one(world, one_axis());
  }
}

// Inputs that require grad on one rank only: there the frozen unit is part of the backward, so all
// ranks gather it (whether a collective is issued may not depend on one rank).
TEST_P_ON_RANKS(FrozenOnRanks, RanksThatDifferInWhatIsDifferentiatedGatherAlike, count()) {
  PartlyFrozen model(mesh(world), {0, 1}, /*scale_is_frozen=*/true);
  auto x = input_of(world.rank(), 0, kWidth);
  x.set_requires_grad(world.rank() == 0);
  const auto one = mesh(world).size_of(axis::kShard) > 1 ? 1 : 0;
  const auto found = gathers_of(*model.handle, x);
  EXPECT_EQ(found.backward, (world.size() == 1 ? 0 : kBlocks) * one);
  if (world.rank() == 0) {
    auto y = input_of(0, 0, kWidth).set_requires_grad(true);
    backward(squares(model.plain.forward(y)));
    EXPECT_TRUE(same_bits(x.grad(), y.grad()));
  }
  model.expect_gradients_of_the_plain_one(world, one_axis());
}

}  // namespace
}  // namespace tessera::test::fsdp_frozen_test
