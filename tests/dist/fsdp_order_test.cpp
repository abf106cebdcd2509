// [Note: collective order]: ranks that disagree are named, and what is issued when (prefetch,
// budget, merging, memory) changes no bit.

#include "base/test_hooks.h"
#include "comm/queue.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_order_test {
namespace {

constexpr std::int64_t kWidth = 5;

WorldOptions impatient() {
  WorldOptions options;
  options.timeout = std::chrono::seconds(20);
  options.blocked_after = std::chrono::milliseconds(200);
  return options;
}

class Backends : public ::testing::TestWithParam<ThreadBackend> {};
INSTANTIATE_TEST_SUITE_P(Both, Backends,
                         ::testing::Values(ThreadBackend::kInProcess, ThreadBackend::kGloo),
                         [](const auto& backend) {
                           return backend.param == ThreadBackend::kGloo ? "Gloo" : "InProcess";
                         });

// Naive: two reductions of one size that meet swapped add block0's gradients to block1's and say
// nothing.
TEST_P(Backends, ReductionsSwappedOnOneRankAreNamed) {
  comm::ThreadRanks two(2, GetParam(), impatient());
  // block0's reduction and the root's follow each other at the end of the backward.
  const test_hooks::Set swapped(test_hooks::hold_back, [](const comm::Group& group,
                                                          const comm::Label& label) {
    return group.rank() == 1 && label.kind == comm::Kind::kReduceScatter && label.unit == "block0";
  });
  std::string error;
  const auto seconds = seconds_of([&] {
    error = thrown_by([&] {
      two.run([](World& world) {
        ShardedChain model(data_mesh(world), 1, 2, kWidth);
        backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
      });
    });
  });
  EXPECT_THAT(error, Says("rank 0 issues", "rank 1 issues", "block0"));
  EXPECT_LT(seconds, 10) << "found only by the timeout";
}

// Naive: rank 1's block1 gets the weights of block0 where sizes are equal.
TEST_P(Backends, UnitsEnteredInAnotherOrderAreNamed) {
  comm::ThreadRanks two(2, GetParam(), impatient());
  const auto error = thrown_by([&] {
    two.run([](World& world) {
      const auto mesh = data_mesh(world);
      ShardedChain model(mesh, 1, 2, kWidth);
      if (world.rank() == 1) std::swap(model.chain->handles[0], model.chain->handles[1]);
      backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
    });
  });
  EXPECT_THAT(error, Says("rank 0", "rank 1", "block0", "block1"));
}

// Naive: rank 0 waits for a gather that rank 1 never enters, until the timeout.
TEST_P(Backends, UnitSkippedOnOneRankIsNamedAtOnce) {
  comm::ThreadRanks two(2, GetParam(), impatient());
  std::string error;
  const auto seconds = seconds_of([&] {
    error = thrown_by([&] {
      two.run([](World& world) {
        ShardedChain model(data_mesh(world), 1, 3, kWidth);
        if (world.rank() == 1) model.chain->skip = 1;
        backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
      });
    });
  });
  EXPECT_THAT(error, Says("rank 0", "rank 1", "block1"));
  EXPECT_LT(seconds, 10);
}

// Replicas alone gather nothing: only the agreement on the order can find it.
TEST(Order, UnitSkippedOnOneReplicaIsNamedBeforeItsGradientIsSummed) {
  const auto error = thrown_by([&] {
    ranks(2).run([](World& world) {
      ShardedChain model(data_mesh(world, 2), 1, 3, kWidth);
      if (world.rank() == 1) model.chain->skip = 1;
      backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
    });
  });
  EXPECT_THAT(error, Says("the order of units differs between ranks", "rank 0 entered block1",
                          "rank 1 entered block2"));
}

TEST(Order, RanksWithOtherPoliciesAreRefusedBeforeTheFirstGather) {
  const auto error = thrown_by([&] {
    ranks(2).run([](World& world) {
      PrecisionPolicy policy;
      if (world.rank() == 1) policy.reduce_dtype = DType::kBFloat16;
      ShardedChain model(data_mesh(world), 1, 2, kWidth, policy);
      backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
    });
  });
  EXPECT_THAT(error, Says("contracts differ between ranks", "rank 1"));
}

// --------------------------------------------------------------------------------------- prefetch

/// The events of one rank in order: "gather block1", "compute block1", "reduce block1".
struct Log {
  std::mutex mutex;
  std::map<int, std::vector<std::string>> lines;
  void add(int rank, const std::string& line) {
    const std::lock_guard lock(mutex);
    lines[rank].push_back(line);
  }
};

std::string line_of(const comm::Label& label) {
  const bool is_root = label.unit == "(root)";
  if (!is_root && label.unit.rfind("block", 0) != 0) return "";  // a control message
  const auto unit = is_root ? "root" : label.unit;
  if (label.kind == comm::Kind::kAllGather) return "gather " + unit;
  if (label.kind == comm::Kind::kReduceScatter) return "reduce " + unit;
  return "";
}

TEST(Order, NextUnitIsGatheredBeforeThisOneComputesFromTheSecondStepOn) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  Log log;
  const test_hooks::Set watched(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    const auto line = line_of(batch.label);
    if (!line.empty()) log.add(rank, line);
  });
  std::vector<std::map<int, std::vector<std::string>>> steps;
  two.run([&](World& world) {
    ShardedChain model(data_mesh(world), 1, 3, kWidth);
    for (std::size_t i = 0; i < 3; ++i) {
      model.chain->blocks[i]->before = [&world, &log, i] {
        world.queue().drain();
        log.add(world.rank(), concat("compute block", i));
      };
    }
    for (int step = 0; step < 3; ++step) {
      backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
      model.handle.zero_grad();
      comm::barrier(world.control(), "step");
      if (world.rank() == 0) steps.push_back(std::exchange(log.lines, {}));
      comm::barrier(world.control(), "taken");
    }
  });
  ASSERT_EQ(steps.size(), 3U);
  for (const auto& step : steps) EXPECT_EQ(step.at(0), step.at(1)) << "ranks issue in one order";
  EXPECT_EQ(steps[1].at(0), steps[2].at(0)) << "a steady step repeats itself";
  EXPECT_THAT(steps[0].at(0),
              ElementsAre("gather root", "gather block0", "compute block0", "gather block1",
                          "compute block1", "gather block2", "compute block2", "gather block2",
                          "gather block1", "reduce block2", "gather block0", "reduce block1",
                          "reduce block0", "reduce root"));
  // The last block keeps its memory: its backward comes first.
  EXPECT_THAT(steps[1].at(0),
              ElementsAre("gather root", "gather block0", "gather block1", "compute block0",
                          "gather block2", "compute block1", "compute block2", "gather block1",
                          "reduce block2", "gather block0", "reduce block1", "reduce block0",
                          "reduce root"));
}

// ------------------------------------------------------------------------- nothing changes a bit

struct Bits {
  Tensors gradients, parameters;
  std::int64_t gathers = 0, reductions = 0;
};

Bits train(World& world, const ShardOptions& root, const ShardOptions& inner = {}) {
  ShardedChain model(data_mesh(world), 3, 3, kWidth, {}, root, inner);
  const auto optimizer = make_sgd(model.handle, sgd(0.01, 0.9));
  Bits bits;
  for (int step = 0; step < 3; ++step) {
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
    bits.gradients = whole_gradients(model.handle);
    optimizer->step();
  }
  bits.parameters = whole_parameters(model.handle);
  bits.gathers = model.handle.unit()->runtime().gathers_issued();
  bits.reductions = model.handle.unit()->runtime().reductions_issued();
  return bits;
}

class OrderOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OrderOnRanks, ::testing::Values(1, 2, 3));

TEST_P_ON_RANKS(OrderOnRanks, ATinyBudgetGivesTheSameBits, GetParam()) {
  const auto expected = train(world, {});
  ShardOptions tiny;
  tiny.in_flight_bytes = 1;
  const auto found = train(world, tiny);
  expect_same(found.gradients, expected.gradients);
  expect_same(found.parameters, expected.parameters);
}

TEST_P_ON_RANKS(OrderOnRanks, KeepingUnitsGatheredAfterForwardGivesTheSameBits, GetParam()) {
  const auto expected = train(world, {});
  ShardOptions keep, recycle;
  keep.reshard_after_forward = false;
  recycle.reshard_after_forward = true;
  for (const auto& [root, inner] : {std::pair{keep, keep}, std::pair{recycle, recycle}}) {
    const auto found = train(world, root, inner);
    expect_same(found.gradients, expected.gradients);
    expect_same(found.parameters, expected.parameters);
  }
}

TEST_ON_RANKS(Order, KeepingUnitsGatheredSavesTheGathersOfTheBackward, 2) {
  ShardOptions keep;
  keep.reshard_after_forward = false;
  EXPECT_EQ(train(world, {}, keep).gathers, 3 * 4);
  // 3 blocks in forward and backward, the root once; the last block's second gather falls away
  // from step 2 on.
  EXPECT_EQ(train(world, {}).gathers, 7 + 6 + 6);
}

TEST_P_ON_RANKS(OrderOnRanks, SmallBucketsMergedIntoTheRootGiveTheSameBits, GetParam()) {
  const auto expected = train(world, {});
  ShardOptions merge;
  merge.merge_below_bytes = 1 << 20;
  const auto found = train(world, merge);
  expect_same(found.gradients, expected.gradients);
  expect_same(found.parameters, expected.parameters);
  if (world.size() == 1) return;
  EXPECT_EQ(expected.reductions, 3 * 4);
  EXPECT_EQ(found.reductions, 3 * 1) << "one reduction a step is left";
  EXPECT_EQ(found.gathers, 3 * 1) << "gathered once a step";
}

TEST(Order, SomeBucketsBelowTheThresholdMoveAndTheRestStays) {
  struct Two : torch::nn::Module {
    at::Tensor small = register_parameter("small", seeded(1, {4}));
    at::Tensor large = register_parameter("large", seeded(2, {64, 8}, at::kDouble));
    at::Tensor forward(const at::Tensor& x) {
      return (x * small).sum() * large.to(at::kFloat).sum();
    }
  };
  struct Outer : torch::nn::Module {
    std::shared_ptr<Sharded<Two>> two;
    at::Tensor forward(const at::Tensor& x) { return two->forward(x); }
  };
  ranks(2).run([](World& world) {
    const auto mesh = data_mesh(world);
    auto plain = std::make_shared<Two>();
    auto outer = std::make_shared<Outer>();
    outer->two = outer->register_module(
        "two", std::make_shared<Sharded<Two>>(fully_shard(std::make_shared<Two>(), mesh)));
    ShardOptions options;
    options.merge_below_bytes = 2048;
    auto handle = fully_shard(outer, mesh, {}, options);
    EXPECT_EQ(outer->two->unit()->buckets().size(), 1U);
    EXPECT_EQ(handle.unit()->buckets().size(), 1U);
    const auto x = seeded(9, {4});
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      backward(handle.forward(x));
      const auto found = whole_gradients(handle);
      const auto raw = raw_gradients(*plain, [&] { backward(plain->forward(x)); });
      EXPECT_TRUE(same_bits(found.at("two.small"), raw.at("small")));
      EXPECT_TRUE(same_bits(found.at("two.large"), raw.at("large")));
    }
    const auto names = handle.named_parameters().keys();
    EXPECT_THAT(names, ::testing::UnorderedElementsAre("two.small", "two.large"));
  });
}

// Naive: buffers from the allocator, fresh pages every step.
TEST_P_ON_RANKS(OrderOnRanks, ASteadyStepMakesNoNewBlock, GetParam()) {
  auto policy = in_bfloat16();
  policy.reduce_dtype = DType::kBFloat16;
  ShardedChain model(data_mesh(world), 3, 4, 16, policy);
  auto& pool = *model.handle.unit()->runtime().pool();
  std::int64_t blocks = -1;
  for (int step = 0; step < 6; ++step) {
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), step, 16))));
    if (step == 2) blocks = pool.blocks_made();
    if (step > 2) {
      EXPECT_EQ(pool.blocks_made(), blocks) << "step " << step;
    }
  }
  EXPECT_GT(blocks, 0);
}

// Naive: results read before the wait; with delivery at the wait only code that waits sees them.
TEST(Order, NothingIsReadBeforeItsCollectiveHasBeenWaitedFor) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  Bits expected;
  two.run([&](World& world) {
    auto bits = train(world, {});
    if (world.rank() == 0) expected = std::move(bits);
  });
  const test_hooks::Set late(test_hooks::deliver_at_wait, [] { return true; });
  two.run([&](World& world) {
    const auto found = train(world, {});
    expect_same(found.gradients, expected.gradients);
    expect_same(found.parameters, expected.parameters);
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_order_test
