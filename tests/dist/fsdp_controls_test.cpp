// Runtime controls: each changes what is issued exactly as it says, and no bit of any gradient.
#include <torch/optim/sgd.h>

#include "dist/controls.h"
#include "support/test.h"

namespace tessera::test::fsdp_controls_test {
namespace {

class ControlsOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ControlsOnRanks, ::testing::Values(1, 2, 3, 4));

// ----------------------------------------------------------------------- reshard after forward

// From the second step on: every unit once in forward; in backward again those that gave their
// memory back, but for the last block, whose backward comes first.
TEST_P_ON_RANKS(ControlsOnRanks, ReshardAfterForwardMayBeSwitchedBetweenSteps, GetParam()) {
  Twins twins(world);
  const auto optimizer = make_sgd(twins.handle(), sgd(0.05));
  int number = 0;
  const auto gathers = [&](const char* what) {
    const auto counts = twins.step(number++, what);
    optimizer->step();
    EXPECT_EQ(counts.reductions, world.size() > 1 ? kBlocks + 1 : 0) << what;
    return world.size() > 1 ? counts.gathers : 0;
  };
  const auto expect = [&](std::int64_t count) { return world.size() > 1 ? count : 0; };
  gathers("first");
  EXPECT_EQ(gathers("default"), expect(4 + 2));
  twins.handle().set_reshard_after_forward(false);
  EXPECT_EQ(gathers("no unit"), expect(4));
  twins.handle().set_reshard_after_forward(true);
  EXPECT_EQ(gathers("every unit"), expect(4 + 3));
  twins.handle().set_reshard_after_forward(false, /*recurse=*/false);
  EXPECT_EQ(gathers("the blocks"), expect(4 + 2));
  twins.block(0).set_reshard_after_forward(false);
  EXPECT_EQ(gathers("two blocks"), expect(4 + 1));
}

TEST_ON_RANKS(Controls, SwitchesThatABackwardDependsOnAreRefusedBeforeItRan, 2) {
  Twins twins(world);
  auto loss = squares(twins.forward(0));
  auto& block = twins.block(0);
  for (const auto& set :
       std::vector<std::function<void()>>{[&] { block.set_reshard_after_forward(false); },
                                          [&] { block.set_reshard_after_backward(false); },
                                          [&] { block.set_unshard_in_backward(false); },
                                          [&] { block.set_forward_prefetch({&twins.block(1)}); },
                                          [&] { block.set_backward_prefetch({&twins.block(1)}); },
                                          [&] { block.set_gradient_divide_factor(2); }}) {
    EXPECT_THAT(thrown_by(set), Says("whose backward has not run"));
  }
  backward(loss);
  twins.expect_plain(0);
}

// ---------------------------------------------------------------------- reshard after backward

TEST_P_ON_RANKS(ControlsOnRanks, UnitsMayStayGatheredBetweenMicroBatches, GetParam()) {
  Twins twins(world);
  const auto expect = [&](std::int64_t count) { return world.size() > 1 ? count : 0; };
  const auto optimizer = make_sgd(twins.handle(), sgd(0.05));
  twins.step(0);
  twins.handle().set_reshard_after_backward(false);
  for (const bool after_forward : {true, false}) {
    if (!after_forward) twins.handle().set_reshard_after_forward(false);
    for (int step = 0; step < 2; ++step) {
      optimizer->step();
      EXPECT_EQ(twins.step(10, "after a step").gathers, expect(after_forward ? 4 + 2 : 4));
      // Nothing has changed: only what a forward resharded is gathered, for the backward.
      EXPECT_EQ(twins.step(11, "kept").gathers, expect(after_forward ? 2 : 0));
      EXPECT_EQ(twins.step(12, "kept").gathers, expect(after_forward ? 2 : 0));
    }
  }
  twins.handle().set_reshard_after_backward(true);
  EXPECT_EQ(twins.step(13, "resharded").gathers, expect(4));
}

// Naive: with torch::optim the version counters stand still, and kept units compute with the
// weights of before the step for ever.
TEST_P_ON_RANKS(ControlsOnRanks, KeptUnitsFollowAnyWriterOfTheShards, GetParam()) {
  Twins twins(world);
  twins.handle().set_reshard_after_backward(false);
  torch::optim::SGD optimizer(twins.handle().parameters(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < 3; ++step) {
    twins.step(step, "torch::optim");
    optimizer.step();
  }
}

// Fewer elements than a rank's part of a bucket: all on rank 0, the others' shards never change.
// Naive: rank 0 gathers alone, and the run hangs.
TEST_P_ON_RANKS(ControlsOnRanks, AChangeThatOneRankAloneSeesIsGatheredByAll, GetParam()) {
  for (const bool by_user : {true, false}) {
    auto handle = fully_shard(std::make_shared<Scale>(here(at::full({4}, 2.0F))), data_mesh(world));
    const auto x = here(at::arange(4, at::kFloat));
    if (!by_user) handle.set_reshard_after_backward(false);
    backward(handle.forward(x).sum());
    if (by_user) handle.unshard();
    for (const auto& view : handle.shards()) view.shard.data().fill_(3.0F);
    EXPECT_TRUE(same_bits(handle.forward(x).detach(), x * 3)) << by_user;
  }
}

TEST_P_ON_RANKS(ControlsOnRanks, EvaluationGathersKeptUnitsOnce, GetParam()) {
  Twins twins(world);
  twins.step(0);
  twins.handle().set_reshard_after_backward(false);
  twins.handle().set_reshard_after_forward(false);
  twins.follow();
  const at::NoGradGuard no_grad;
  std::int64_t first = -1;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(same_bits(twins.forward(i), twins.plain.forward(twins.input(i))));
    if (i == 0) first = twins.issued().gathers;
  }
  EXPECT_EQ(twins.issued().gathers, first);
}

// ---------------------------------------------------------------------------- unshard in backward

/// Its backward reads ids, not the table.
class Table : public torch::nn::Module {
 public:
  at::Tensor weight = register_parameter("weight", seeded(3, {6, 5}));
  at::Tensor forward(const at::Tensor& ids) { return at::embedding(weight, ids); }
};

class TableModel : public torch::nn::Module {
 public:
  std::shared_ptr<Table> table = register_module("table", std::make_shared<Table>());
  std::shared_ptr<Block> block = register_module("block", std::make_shared<Block>(7, 5));
  std::shared_ptr<Sharded<Table>> table_handle;
  std::shared_ptr<Sharded<Block>> block_handle;
  void shard(const Mesh& mesh) {
    table_handle = std::make_shared<Sharded<Table>>(fully_shard(table, mesh));
    replace_module("table", table_handle);
    block_handle = std::make_shared<Sharded<Block>>(fully_shard(block, mesh));
    replace_module("block", block_handle);
  }
  at::Tensor forward(const at::Tensor& ids) {
    if (!table_handle) return block->forward(table->forward(ids));
    return block_handle->forward(table_handle->forward(ids));
  }
};

TEST_P_ON_RANKS(ControlsOnRanks, AUnitWhoseBackwardReadsNoParameterNeedNotBeGatheredForIt,
                GetParam()) {
  TableModel plain;
  auto module = std::make_shared<TableModel>();
  module->shard(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  const auto ids = [](int rank) {
    return here(at::arange(4, at::kLong)).add(rank).remainder(6).reshape({2, 2});
  };
  auto& runtime = handle.unit()->runtime();
  std::vector<std::int64_t> gathers;
  for (int step = 0; step < 4; ++step) {
    if (step == 2) module->table_handle->set_unshard_in_backward(false);
    handle.zero_grad();
    const auto before = runtime.gathers_issued();
    backward(squares(handle.forward(ids(world.rank()))));
    gathers.push_back(runtime.gathers_issued() - before);
    expect_same(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(),
                                [&](int rank) { backward(squares(plain.forward(ids(rank)))); }));
  }
  if (world.size() == 1) return;
  EXPECT_EQ(gathers[2], gathers[1] - 1);
  EXPECT_EQ(gathers[3], gathers[1] - 1);
}

// Naive: the memory of another unit, or a crash.
TEST(Controls, ABackwardThatReadsWhatIsNotGatheredForItIsToldWhy) {
  const auto errors = errors_of(2, [](World& world) {
    Twins twins(world);
    twins.block(0).set_unshard_in_backward(false);
    twins.run(0);
  });
  EXPECT_THAT(errors, Contains(Says("block0", "set_unshard_in_backward(true)")));
}

// ------------------------------------------------------------------------------- unshard by hand

TEST_P_ON_RANKS(ControlsOnRanks, AsynchronousGathersAreWaitedForWhereTheyAreNeeded, GetParam()) {
  Twins twins(world);
  const auto optimizer = make_sgd(twins.handle(), sgd(0.05));
  for (int step = 0; step < 3; ++step) {
    twins.handle().zero_grad();
    const auto before = twins.issued().gathers;
    std::vector<UnshardHandle> pending;
    pending.push_back(twins.handle().unshard_async());
    for (std::size_t i = 0; i < kBlocks; ++i) pending.push_back(twins.block(i).unshard_async());
    pending.push_back(twins.block(0).unshard_async());  // under way already
    if (step == 1) pending[2].wait();
    const auto by_hand = twins.issued().gathers - before;
    EXPECT_EQ(by_hand, world.size() > 1 ? kBlocks + 1 : 0);
    const auto loss = squares(twins.forward(step));
    EXPECT_EQ(twins.issued().gathers - before, by_hand) << "the forward gathered again";
    backward(loss);
    twins.expect_plain(step);
    optimizer->step();
    for (auto& handle : pending) handle.wait();  // nothing is left to wait for
  }
}

TEST_P_ON_RANKS(ControlsOnRanks, UnshardAgainAfterAWriteShowsTheNewValues, GetParam()) {
  auto module = std::make_shared<Scale>(here(at::full({70}, 2.0F)));
  auto handle = fully_shard(module, data_mesh(world));
  handle.unshard();
  EXPECT_TRUE(same_bits(module->weight.detach(), here(at::full({70}, 2.0F))));
  for (const auto& view : handle.shards()) view.shard.data().fill_(3.0F);
  handle.unshard();
  EXPECT_TRUE(same_bits(module->weight.detach(), here(at::full({70}, 3.0F))));
}

TEST_P(ControlsOnRanks, AUnitWithoutParametersMayBeUnsharded) {
  struct Twice : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x * 2; }
  };
  ranks(GetParam()).run([](World& world) {
    auto handle = fully_shard(std::make_shared<Twice>(), data_mesh(world));
    handle.unshard();
    handle.unshard_async().wait();
    EXPECT_TRUE(same_bits(handle.forward(here(at::ones({2}))), here(at::full({2}, 2.0F))));
    handle.reshard();
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_controls_test
