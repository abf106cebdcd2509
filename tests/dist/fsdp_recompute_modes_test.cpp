// checkpoint() in every mode: what is kept, what is computed again, and that no bit tells.

#include "dist/held_bytes.h"
#include "dist/kept_product.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_recompute_modes_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr std::int64_t kRows = 3;  // of input_of()
constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kFull,
                                    RecomputeMode::kSelective};

/// Blocks, each a unit, in a root with a scale of its own.
class KeptChain : public torch::nn::Module {
 public:
  KeptChain(int count, RecomputeMode mode)
      : scale(register_parameter("scale", seeded(1, {kWidth}) + 1.0)) {
    for (int i = 0; i < count; ++i) {
      const auto block = std::make_shared<KeptBlock>(static_cast<std::uint64_t>(10 + i), kWidth);
      block->mode = mode;
      blocks.push_back(register_module(concat("block", i), block));
    }
  }
  void shard_blocks(const Mesh& mesh) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      handles.push_back(std::make_shared<Sharded<KeptBlock>>(fully_shard(blocks[i], mesh)));
      replace_module(concat("block", i), handles.back());
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = scaled ? x * scale : x;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto call = [this, i](const std::vector<at::Tensor>& in) {
        return handles.empty() ? blocks[i]->forward(in[0]) : handles[i]->forward(in[0]);
      };
      y = checkpoint(call, {y}, outside);
    }
    return scaled ? y : y * scale;
  }
  std::vector<std::shared_ptr<KeptBlock>> blocks;
  std::vector<std::shared_ptr<Sharded<KeptBlock>>> handles;
  at::Tensor scale;
  bool scaled = true;  ///< before the blocks; else after, and what they get needs no gradient
  RecomputeMode outside = RecomputeMode::kNone;
};

struct ShardedKeptChain {
  ShardedKeptChain(const Mesh& mesh, int count, RecomputeMode mode)
      : chain(std::make_shared<KeptChain>(count, mode)),
        handle((chain->shard_blocks(mesh), fully_shard(chain, mesh))) {}
  std::shared_ptr<KeptChain> chain;
  Sharded<KeptChain> handle;
};

struct Seen {
  std::vector<Tensors> gradients;
  Tensors parameters;
  std::int64_t gathers = 0, reductions = 0;
  int calls = 0, computed = 0;
};

constexpr int kBlocks = 3;
constexpr int kSteps = 3;

Seen train(World& world, RecomputeMode inside, RecomputeMode outside, bool scaled = true) {
  ShardedKeptChain model(data_mesh(world), kBlocks, inside);
  model.chain->outside = outside;
  model.chain->scaled = scaled;
  const auto optimizer = make_adamw(model.handle, adamw(0.01));
  Seen seen;
  for (int step = 0; step < kSteps; ++step) {
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
    seen.gradients.push_back(whole_gradients(model.handle));
    optimizer->step();
    for (const auto& handle : model.chain->handles) {
      EXPECT_EQ(handle->unit()->expected(), 0);
      EXPECT_FALSE(handle->unit()->gathered());
    }
  }
  seen.parameters = whole_parameters(model.handle);
  seen.gathers = model.handle.unit()->runtime().gathers_issued();
  seen.reductions = model.handle.unit()->runtime().reductions_issued();
  for (const auto& block : model.chain->blocks) {
    seen.calls += block->calls;
    seen.computed += block->computed;
  }
  return seen;
}

void expect_same_but_calls(const Seen& found, const Seen& expected) {
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    expect_same(found.gradients[i], expected.gradients[i], concat("step ", i));
  }
  expect_same(found.parameters, expected.parameters);
  EXPECT_EQ(found.gathers, expected.gathers) << "recomputation gathers nothing of its own";
  EXPECT_EQ(found.reductions, expected.reductions);
}

class RecomputeModes : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Grid, RecomputeModes,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));

// Also one in the other: the inner one's first run is then the outer one's second.
TEST_P(RecomputeModes, EveryCompositionGivesTheBitsAndGathersOfThePlainCall) {
  const int count = std::get<0>(GetParam());
  const bool scaled = std::get<1>(GetParam());
  ranks(count).run([scaled](World& world) {
    const auto expected = train(world, RecomputeMode::kNone, RecomputeMode::kNone, scaled);
    EXPECT_EQ(expected.computed, 2 * kBlocks * kSteps);
    for (const auto inside : kModes) {
      for (const auto outside : kModes) {
        SCOPED_TRACE(
            concat("inside ", static_cast<int>(inside), ", outside ", static_cast<int>(outside)));
        const auto found = train(world, inside, outside, scaled);
        expect_same_but_calls(found, expected);
        int runs = 1, products = 1;
        for (const auto mode : {inside, outside}) {
          runs += mode != RecomputeMode::kNone;
          products += mode == RecomputeMode::kFull;
        }
        EXPECT_EQ(found.calls, runs * expected.calls);
        EXPECT_EQ(found.computed, products * expected.computed);
      }
    }
  });
}

std::int64_t held_after_forward(World& world, int blocks, RecomputeMode mode) {
  ShardedKeptChain model(data_mesh(world), blocks, mode);
  std::int64_t held = 0;
  for (int step = 0; step < 3; ++step) {  // the first ones fill the pools
    model.handle.zero_grad();
    const auto x = input_of(world.rank(), step, kWidth);
    const HeldBytes counter;
    const auto y = model.handle.forward(x);
    held = counter.bytes();
    backward(squares(y));
  }
  return held;
}

// A block holds what one block more adds: nothing else of the model depends on it.
TEST(RecomputeBytes, ABlockHoldsItsInputAndInSelectiveModeItsProducts) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto of_a_block = [&](RecomputeMode mode) {
        return held_after_forward(world, 5, mode) - held_after_forward(world, 4, mode);
      };
      constexpr std::int64_t input = kRows * kWidth * 4;
      constexpr std::int64_t products = kRows * 3 * kWidth * 4;
      EXPECT_EQ(of_a_block(RecomputeMode::kFull), input);
      EXPECT_EQ(of_a_block(RecomputeMode::kSelective), input + products);
      EXPECT_GT(of_a_block(RecomputeMode::kNone), input + products);
    });
  }
}

// The engine drops what a block kept as it goes; a loss that is still alive holds none of it.
TEST(RecomputeBytes, NothingIsHeldAfterBackwardWhileTheLossLives) {
  for (const auto mode : kModes) {
    KeptChain chain(4, mode);
    backward(squares(chain.forward(input_of(0, 0, kWidth))));  // makes the gradients
    const auto x = input_of(0, 1, kWidth);
    const HeldBytes counter;
    const auto loss = squares(chain.forward(x));
    EXPECT_GT(counter.bytes(), 0);
    backward(loss);
    EXPECT_EQ(counter.bytes(), static_cast<std::int64_t>(loss.nbytes())) << static_cast<int>(mode);
  }
}

TEST(RecomputeBytes, WithoutGradModeNothingIsHeldAndNothingRunsAgain) {
  const at::NoGradGuard no_grad;
  for (const auto mode : kModes) {
    KeptChain chain(2, mode);
    const auto x = input_of(0, 0, kWidth);
    const HeldBytes counter;
    const auto y = chain.forward(x);
    EXPECT_FALSE(y.requires_grad());
    EXPECT_EQ(counter.bytes(), static_cast<std::int64_t>(y.nbytes()));
    EXPECT_EQ(chain.blocks[0]->calls, 1);
  }
}

// Naive: the second forward overwrites what the first one's checkpoint knows.
TEST_ON_RANKS(RecomputeOrder, TwoForwardsBeforeTheirBackwardsInAnyOrder, 2) {
  const auto run = [&](RecomputeMode mode, bool newest_first) {
    ShardedKeptChain model(data_mesh(world), kBlocks, mode);
    const auto one = squares(model.handle.forward(input_of(world.rank(), 0, kWidth)));
    const auto two = squares(model.handle.forward(input_of(world.rank(), 1, kWidth)));
    backward(newest_first ? two : one);
    backward(newest_first ? one : two);
    return whole_gradients(model.handle);
  };
  for (const bool newest_first : {true, false}) {
    const auto expected = run(RecomputeMode::kNone, newest_first);
    expect_same(run(RecomputeMode::kFull, newest_first), expected);
    expect_same(run(RecomputeMode::kSelective, newest_first), expected);
  }
}

TEST(RecomputeOrder, BackwardTwiceOverARetainedGraphFindsWhatWasKeptAgain) {
  for (const auto mode : kModes) {
    KeptChain chain(2, mode);
    const auto loss = squares(chain.forward(input_of(0, 0, kWidth)));
    backward_and_keep_graph(loss);
    const auto once = chain.blocks[0]->a.grad().clone();
    backward(loss);
    EXPECT_TRUE(same_bits(chain.blocks[0]->a.grad(), once * 2));
  }
}

// A frozen base below a trainable part: its weights are needed again for the gradient of the input.
TEST_ON_RANKS(RecomputeFrozen, AFrozenProductNextToATrainableOneGivesTheBitsOfThePlainCall, 2) {
  const auto run = [&](RecomputeMode mode) {
    auto chain = std::make_shared<KeptChain>(kBlocks, mode);
    for (const auto& block : chain->blocks) block->a.set_requires_grad(false);
    chain->blocks[1]->b.set_requires_grad(false);
    chain->shard_blocks(data_mesh(world));
    auto handle = fully_shard(chain, data_mesh(world));
    Tensors all;
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
      for (auto& [name, value] : whole_gradients(handle)) all[concat(step, name)] = value;
    }
    return all;
  };
  const auto expected = run(RecomputeMode::kNone);
  EXPECT_EQ(expected.size(), 2U * 3U);
  expect_same(run(RecomputeMode::kFull), expected);
  expect_same(run(RecomputeMode::kSelective), expected);
}

TEST(RecomputeRandomModes, DropoutGivesTheBitsOfThePlainCall) {
  const auto run = [](RecomputeMode mode) {
    at::manual_seed(3);
    KeptChain chain(kBlocks, mode);
    for (const auto& block : chain.blocks) block->dropout = 0.5;
    backward(squares(chain.forward(input_of(0, 0, kWidth))));
    Tensors seen{{"drawn afterwards", at::rand({3})}};
    for (const auto& entry : chain.named_parameters()) seen[entry.key()] = entry.value().grad();
    return seen;
  };
  const auto expected = run(RecomputeMode::kNone);
  expect_same(run(RecomputeMode::kFull), expected);
  expect_same(run(RecomputeMode::kSelective), expected);
}

}  // namespace
}  // namespace tessera::test::fsdp_recompute_modes_test
