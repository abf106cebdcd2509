// Objects that outlive their handle: optimizers, scalers, inner handles, views, watches. Each
// continues with what it holds, or says what is missing; none reads freed memory.

#include <limits>

#include "dist/data_layout.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/dtype_watch.h"
#include "tessera/grad_scaler.h"
#include "tessera/state_dict.h"

namespace tessera::test::fsdp_outliving_test {
namespace {

constexpr std::int64_t kWidth = 6;

class OutlivingOnRanks : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, OutlivingOnRanks, every_data_layout(), name_of);

std::vector<std::string> names_of(const std::vector<OptimizerState>& states) {
  std::vector<std::string> names;
  for (const auto& state : states) names.push_back(state.view.contract->name);
  return names;
}

/// Takes the memory that was just freed, so that a late reader reads something else.
std::vector<std::string> litter() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < 4000; ++i) names.emplace_back(16 + i % 2000, 'x');
  return names;
}

// Naive: the optimizer reads contracts of parameters whose units went with the handles inside.
TEST_P_ON_RANKS(OutlivingOnRanks, AnOptimizerStepsTheShardsThatItHolds, GetParam()) {
  for (const bool adam : {true, false}) {
    const auto mesh = data_mesh(world, GetParam().replicas);
    ShardedChain kept(mesh, 1, 2, kWidth);
    auto gone = std::make_unique<ShardedChain>(mesh, 1, 2, kWidth);
    const auto make = [&](const ShardedBase& handle) {
      return adam ? make_adamw(handle, adamw(0.1)) : make_sgd(handle, sgd(0.1, 0.9));
    };
    const auto of_kept = make(kept.handle);
    const auto of_gone = make(gone->handle);
    for (auto* model : {&kept, gone.get()}) {
      backward(squares(model->handle.forward(input_of(world.rank(), 0, kWidth))));
    }
    const auto shards = gone->handle.shards();
    gone.reset();
    const auto other = litter();
    of_kept->step();
    of_gone->step();
    EXPECT_EQ(names_of(of_gone->state()), names_of(of_kept->state()));
    EXPECT_EQ(of_gone->kept_names(), of_kept->kept_names());
    of_gone->set_steps("block1.a", 7);
    for (const auto steps : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
      EXPECT_NE(thrown_by([&] { of_gone->set_steps("block1.a", steps); }), "");
    }
    EXPECT_THAT(thrown_by([&] { of_gone->make_kept("none"); }), Says("no trainable parameter"));
    const auto expected = kept.handle.shards();
    ASSERT_EQ(shards.size(), expected.size());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      EXPECT_EQ(shards[i].contract->name, expected[i].contract->name);
      EXPECT_TRUE(same_bits(shards[i].shard, expected[i].shard)) << shards[i].contract->name;
    }
  }
}

TEST_P_ON_RANKS(OutlivingOnRanks, AScalerAndAWatchEndAfterTheirModel, GetParam()) {
  const auto replicas = GetParam().replicas;
  auto model = std::make_unique<ShardedChain>(data_mesh(world, replicas), 1, 2, kWidth);
  auto scaler = std::make_unique<GradScaler>(model->handle);
  auto watch = std::make_unique<DtypeWatch>(model->handle);
  backward(scaler->scaled(squares(model->handle.forward(input_of(world.rank(), 0, kWidth)))));
  model.reset();
  const auto other = litter();
  // Another model may lie where the watched one was.
  ShardedChain next(data_mesh(world, replicas), 2, 2, kWidth, in_bfloat16());
  next.handle.forward(input_of(world.rank(), 0, kWidth));
  EXPECT_TRUE(watch->findings().empty());
  watch.reset();
  scaler.reset();
}

TEST_P_ON_RANKS(OutlivingOnRanks, ViewsOfShardsAndBuffersKeepTheirContracts, GetParam()) {
  const auto replicas = GetParam().replicas;
  struct WithBuffer : Chain {
    explicit WithBuffer(std::uint64_t seed) : Chain(seed, 2, kWidth) {
      register_buffer("table_of_positions", here(at::ones({3})));
    }
  };
  auto chain = std::make_shared<WithBuffer>(1);
  chain->shard_blocks(data_mesh(world, replicas));
  auto handle =
      std::make_unique<Sharded<WithBuffer>>(fully_shard(chain, data_mesh(world, replicas)));
  const auto shards = handle->shards();
  const auto buffers = handle->buffers();
  const auto contract = handle->contract();
  handle.reset();
  chain.reset();
  const auto other = litter();
  ASSERT_EQ(shards.size(), contract.parameters.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    EXPECT_EQ(*shards[i].contract, contract.parameters[i]);
  }
  ASSERT_EQ(buffers.size(), 1U);
  EXPECT_EQ(*buffers[0].contract, contract.buffers[0]);
}

/// How the outermost unit comes to hold what blocks use.
enum class Moved : std::uint8_t { kNothing, kSmall, kTied };

/// The chain's blocks are sharded, then the chain.
std::unique_ptr<Sharded<Chain>> sharded_around(const std::shared_ptr<Chain>& chain,
                                               const Mesh& mesh, Moved moved) {
  ShardOptions root;
  if (moved == Moved::kSmall) root.merge_below_bytes = 1 << 20;
  if (moved == Moved::kTied) chain->register_parameter("tied", chain->blocks[0]->a);
  chain->shard_blocks(mesh);
  return std::make_unique<Sharded<Chain>>(fully_shard(chain, mesh, {}, root));
}

class InnerOnRanks : public ::testing::TestWithParam<std::tuple<DataLayout, Moved>> {};
INSTANTIATE_TEST_SUITE_P(Grid, InnerOnRanks,
                         ::testing::Combine(every_data_layout(),
                                            ::testing::Values(Moved::kNothing, Moved::kSmall,
                                                              Moved::kTied)));

// Naive: parameters that had moved to the outermost unit are freed with it; shards() of the inner
// handle reads them, and its forward computes with a unit that is gone.
TEST_P_ON_RANKS(InnerOnRanks, AnInnerHandleTrainsOnAfterTheOutermostIsGone,
                std::get<0>(GetParam())) {
  const auto [layout, moved] = GetParam();
  auto chain = std::make_shared<Chain>(1, 2, kWidth);
  auto outermost = sharded_around(chain, data_mesh(world, layout.replicas), moved);
  backward(squares(outermost->forward(input_of(world.rank(), 0, kWidth))));
  outermost->zero_grad();
  const std::vector<std::shared_ptr<Sharded<Block>>> inner = chain->handles;
  outermost.reset();
  chain.reset();
  const auto other = litter();

  Block plain(11, kWidth);
  auto& handle = *inner[0];
  EXPECT_THAT(handle.shards().at(0).contract->name, Says("block0"));
  EXPECT_EQ(handle.named_parameters().size(), 2U);
  EXPECT_EQ(handle.contract().parameters.size(), 2U);
  EXPECT_EQ(handle.buffers().size(), 0U);
  EXPECT_NE(handle.contract_table(), "");
  EXPECT_EQ(state_dict(handle, StateDictKind::kFull).size(), 2U);
  const auto optimizer = make_sgd(handle, sgd(0.5));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
    const auto expected = gradients_of_squares(plain, world.size(), step, kWidth, layout.replicas);
    const auto found = whole_gradients(handle);
    EXPECT_EQ(found.size(), 2U);
    for (const auto& [name, gradient] : found) {
      const auto& plain_one = expected.at(name.substr(name.rfind('.') + 1));
      EXPECT_TRUE(step == 0 ? same_bits(gradient, plain_one)
                            : ::testing::AssertionResult(at::allclose(gradient, plain_one)))
          << name;
    }
    EXPECT_GT(clip_grad_norm(handle, 0.0), 0.0);
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (auto& entry : plain.named_parameters()) {
      entry.value().sub_(expected.at(entry.key()), 0.5);
    }
  }
  for (const auto& [name, value] : whole_parameters(handle)) {
    EXPECT_TRUE(at::allclose(value, plain.named_parameters()[name.substr(name.rfind('.') + 1)]));
  }
  handle.set_requires_gradient_sync(true);
  handle.set_reshard_after_forward(false);
  handle.unshard();
  handle.reshard();
  handle.set_loaded();
  handle.train(false);
}

// Naive: the outermost unit is one of the tree's for as long as this rank holds a loss of it; ranks
// that hold none agree on another plan, and wait for the others in a group of their own.
TEST_P_ON_RANKS(InnerOnRanks, AnInnerHandleTrainsOnWhileOneRankKeepsALossOfTheOutermost,
                std::get<0>(GetParam())) {
  const auto [layout, moved] = GetParam();
  auto chain = std::make_shared<Chain>(1, 2, kWidth);
  auto outermost = sharded_around(chain, data_mesh(world, layout.replicas), moved);
  auto loss = squares(outermost->forward(input_of(world.rank(), 0, kWidth)));
  backward_and_keep_graph(loss);
  if (world.rank() > 0) loss = at::Tensor();
  outermost->zero_grad();
  const std::vector<std::shared_ptr<Sharded<Block>>> inner = chain->handles;
  outermost.reset();
  chain.reset();

  Block plain(11, kWidth);
  for (int step = 0; step < 3; ++step) {
    inner[0]->zero_grad();
    backward(squares(inner[0]->forward(input_of(world.rank(), step, kWidth))));
    const auto expected = gradients_of_squares(plain, world.size(), step, kWidth, layout.replicas);
    for (const auto& [name, gradient] : whole_gradients(*inner[0])) {
      EXPECT_TRUE(same_bits(gradient, expected.at(name.substr(name.rfind('.') + 1)))) << name;
    }
    if (step == 1) loss = at::Tensor();
  }
}

// Naive: unit numbers of the old tree in the plan of the new one.
TEST_P(OutlivingOnRanks, ABackwardThroughATreeWhoseOutermostHandleIsGoneIsRefused) {
  const auto [count, replicas, backend] = GetParam();
  const auto run = [replicas](World& world) {
    auto model = std::make_unique<ShardedChain>(data_mesh(world, replicas), 1, 2, kWidth);
    const auto loss = squares(model->handle.forward(input_of(world.rank(), 0, kWidth)));
    backward_and_keep_graph(loss);
    const auto inner = model->chain->handles[0];
    model.reset();
    inner->zero_grad();
    const auto other = squares(inner->forward(input_of(world.rank(), 1, kWidth)));
    backward(loss);
  };
  const auto errors = errors_of(count, run, backend);
  EXPECT_THAT(errors, Each(Not(std::string())));
  EXPECT_THAT(errors, Contains(Says("backward of unit", "before the model had other units")));
}

/// Without a parameter of its own.
struct Around : torch::nn::Module {
  explicit Around(const Mesh& mesh)
      : block(register_module("block", std::make_shared<Sharded<Affine>>(fully_shard(
                                           std::make_shared<Affine>(1, kWidth, kWidth), mesh)))) {}
  at::Tensor forward(const at::Tensor& x) { return block->forward(x); }
  std::shared_ptr<Sharded<Affine>> block;
};

// Naive: a second prefix before its names, and units of two trees in one order.
TEST(Inner, AHandleThatAnOuterOneHasTakenInIsNotTakenInAgain) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto mesh = data_mesh(world);
      auto around = std::make_shared<Around>(mesh);
      {
        const auto outermost = fully_shard(around, mesh);
      }
      EXPECT_THAT(thrown_by([&] { fully_shard(around, mesh); }), Says("block", "taken in before"));
    });
  }
}

// Naive: the backward finds no plan for its forward ("map::at"), or the new tree's in its place.
TEST(Inner, AHandleWithAForwardOrAGradientIsNotTakenIn) {
  for (const auto& [count, backend] :
       {std::pair(1, ThreadBackend::kInProcess), std::pair(2, ThreadBackend::kInProcess),
        std::pair(3, ThreadBackend::kInProcess), std::pair(2, ThreadBackend::kGloo)}) {
    RankBarrier meeting(count);
    ranks(count, backend).run([&](World& world) {
      RankBarrier::Seat seat(meeting);
      const auto mesh = data_mesh(world);
      auto around = std::make_shared<Around>(mesh);
      Affine plain(1, kWidth, kWidth);
      const auto refusal = [&] { return thrown_by([&] { fully_shard(around, mesh); }); };
      {
        // One rank alone still has a forward.
        auto loss = squares(around->block->forward(input_of(world.rank(), 0, kWidth)));
        if (world.rank() > 0) loss = at::Tensor();
        EXPECT_THAT(refusal(), Says("fully_shard", world.rank() == 0 ? "whose backward has not run"
                                                                     : "another rank refused it"));
      }
      const auto kept = squares(around->block->forward(input_of(world.rank(), 0, kWidth)));
      backward_and_keep_graph(kept);
      EXPECT_THAT(refusal(), Says("around block", "a gradient of weight"));
      expect_same(whole_gradients(*around->block),
                  gradients_of_squares(plain, world.size(), 0, kWidth), "nothing has changed");
      around->block->zero_grad();
      auto handle = fully_shard(around, mesh);
      backward(squares(handle.forward(input_of(world.rank(), 1, kWidth))));
      EXPECT_EQ(whole_gradients(handle).size(), 2U);
      seat.wait();  // the first refusal ends what others are still at
      EXPECT_THAT(thrown_by([&] { backward(kept); }), Says("before the model had other units"));
    });
  }
}

/// A chain in a chain's place, so that parameters can move twice.
struct Nest : torch::nn::Module {
  explicit Nest(const Mesh& mesh, const ShardOptions& options)
      : chain(std::make_shared<Chain>(1, 2, kWidth)) {
    chain->shard_blocks(mesh);
    inside = std::make_shared<Sharded<Chain>>(fully_shard(chain, mesh, {}, options));
    register_module("inside", inside);
  }
  at::Tensor forward(const at::Tensor& x) { return inside->forward(x); }
  std::shared_ptr<Chain> chain;
  std::shared_ptr<Sharded<Chain>> inside;
};

// Naive: a block knows the unit that its parameters moved to first, not the one that has them now.
TEST_P_ON_RANKS(OutlivingOnRanks, WhatMovesTwiceIsFoundWhereItIs, GetParam()) {
  const auto mesh = data_mesh(world, GetParam().replicas);
  ShardOptions merge;
  merge.merge_below_bytes = 1 << 20;
  auto nest = std::make_shared<Nest>(mesh, merge);
  auto handle = std::make_unique<Sharded<Nest>>(fully_shard(nest, mesh, {}, merge));
  Chain plain(1, 2, kWidth);
  const auto x = input_of(world.rank(), 0, kWidth);
  EXPECT_TRUE(same_bits(handle->forward(x).detach(), plain.forward(x).detach()));
  const auto block = nest->chain->handles[1];
  handle.reset();
  nest.reset();
  EXPECT_TRUE(same_bits(block->forward(x).detach(), plain.blocks[1]->forward(x).detach()));
}

// Naive: its slots are asked for weight gradients of a unit that is gone.
TEST_ON_RANKS(Inner, PendingWeightGradientsOfAUnitThatIsGoneAreDroppedByName, 1) {
  auto model = std::make_unique<ShardedChain>(data_mesh(world), 1, 2, kWidth);
  auto& sink = model->handle.unit()->runtime().sink();
  const auto runtime = model->handle.unit()->runtime().shared_from_this();
  const auto slot = model->chain->handles[0]->unit()->parameters()[0]->leaves[0]->slot;
  const auto ticket = sink.promise(slot, "block0", 0);
  const auto block = model->chain->handles[1];
  model.reset();
  {
    const at::NoGradGuard no_grad;
    block->forward(input_of(0, 0, kWidth));  // where all ranks forget it
  }
  const auto other = litter();
  EXPECT_EQ(sink.open_tickets(), 0U);
  EXPECT_THAT(thrown_by([&] { sink.redeem(ticket, here(at::ones({kWidth + 1, kWidth}))); }),
              Says("block0.a", "of a module that is gone"));
  block->run_weight_gradients();
}

TEST_ON_RANKS(MovedFrom, HandlesSayThatTheyAre, 1) {
  auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world));
  const auto now = std::move(handle);
  // The test is about its moved-from state.
  const auto& left = handle;  // NOLINT(bugprone-use-after-move)
  const auto told = Says("a handle that was moved from");
  EXPECT_THAT(thrown_by([&] { make_sgd(left, {}); }), told);
  EXPECT_THAT(thrown_by([&] { gradient_norm(left); }), told);
  EXPECT_THAT(thrown_by([&] { nonfinite_parameters(left, 1); }), told);
  EXPECT_THAT(thrown_by([&] { (void)left.named_buffers(); }), told);
  EXPECT_THAT(thrown_by([&] { (void)left.contract(); }), told);
  EXPECT_EQ(left.shards().size(), 0U);
}

}  // namespace
}  // namespace tessera::test::fsdp_outliving_test
