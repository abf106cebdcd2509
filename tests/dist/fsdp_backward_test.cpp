// [Note: readiness]: several losses, several backwards.

#include "dist/data_layout.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_backward_test {
namespace {

constexpr std::int64_t kWidth = 5;

/// Returns the hidden state and an auxiliary loss on the way, as a router does.
class Routed : public torch::nn::Module {
 public:
  explicit Routed(std::uint64_t seed)
      : gate(register_parameter("gate", seeded(seed, {kWidth, kWidth}))),
        block(register_module("block", std::make_shared<Block>(seed + 1, kWidth))) {}
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto scores = at::softmax(at::linear(x, gate), -1);
    const auto y = handle ? handle->forward(x * scores) : block->forward(x * scores);
    return {y, scores.pow(2).sum()};
  }
  at::Tensor gate;
  std::shared_ptr<Block> block;
  std::shared_ptr<Sharded<Block>> handle;
};

class TwoRouted : public torch::nn::Module {
 public:
  TwoRouted()
      : first(register_module("first", std::make_shared<Routed>(1))),
        second(register_module("second", std::make_shared<Routed>(20))) {}
  void shard(const Mesh& mesh) {
    for (const auto& routed : {first, second}) {
      routed->handle = std::make_shared<Sharded<Block>>(fully_shard(routed->block, mesh));
      routed->replace_module("block", routed->handle);
    }
    one = std::make_shared<Sharded<Routed>>(fully_shard(first, mesh));
    two = std::make_shared<Sharded<Routed>>(fully_shard(second, mesh));
    replace_module("first", one);
    replace_module("second", two);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const auto [y, aux] = one ? one->forward(x) : first->forward(x);
    const auto [z, more] = two ? two->forward(y) : second->forward(y);
    return {z, aux + more};
  }
  std::shared_ptr<Routed> first, second;
  std::shared_ptr<Sharded<Routed>> one, two;
};

class BackwardOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, BackwardOnRanks, ::testing::Values(1, 2, 3));

/// Sum over ranks of each backward alone, added in the order of the backwards, over the number of
/// ranks.
Tensors each_alone(torch::nn::Module& plain, int count,
                   const std::vector<std::function<void(int)>>& backwards) {
  Tensors sums;
  for (const auto& run : backwards) {
    for (const auto& [name, sum] : plain_gradients(plain, count, 1.0, run)) {
      auto& all = sums[name];
      all = all.defined() ? all + sum : sum;
    }
  }
  for (auto& [name, sum] : sums) sum = over(sum, count);
  return sums;
}

// Naive: the auxiliary loss's backward "finishes" the units: they are reduced and released before
// the main one.
TEST_P_ON_RANKS(BackwardOnRanks, AnAuxiliaryLossWhoseBackwardRunsFirst, GetParam()) {
  TwoRouted plain;
  auto module = std::make_shared<TwoRouted>();
  module->shard(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    const auto [y, aux] = handle.forward(input_of(world.rank(), step, kWidth));
    backward_and_keep_graph(aux);
    backward(squares(y));
    const auto only = [&](bool main) {
      return [&plain, main, step](int rank) {
        const auto [z, other] = plain.forward(input_of(rank, step, kWidth));
        backward(main ? squares(z) : other);
      };
    };
    expect_same(whole_gradients(handle),
                each_alone(plain, world.size(), {only(false), only(true)}));
  }
}

TEST_P_ON_RANKS(BackwardOnRanks, SummedLosses, GetParam()) {
  TwoRouted plain;
  auto module = std::make_shared<TwoRouted>();
  module->shard(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    const auto [y, aux] = handle.forward(input_of(world.rank(), step, kWidth));
    backward(squares(y) + aux * 0.5);
    expect_same(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  const auto [z, other] = plain.forward(input_of(rank, step, kWidth));
                  backward(squares(z) + other * 0.5);
                }));
  }
}

TEST_P_ON_RANKS(BackwardOnRanks, OnlyTheAuxiliaryLossIsDifferentiated, GetParam()) {
  TwoRouted plain;
  auto module = std::make_shared<TwoRouted>();
  module->shard(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  const auto [y, aux] = handle.forward(input_of(world.rank(), 0, kWidth));
  backward(aux);
  const auto found = whole_gradients(handle);
  expect_same(found, plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                const auto [z, other] = plain.forward(input_of(rank, 0, kWidth));
                backward(other);
              }));
  for (const auto& view : handle.shards()) {
    if (view.contract->name == "second.block.a") {
      EXPECT_FALSE(view.shard.grad().defined()) << "used by no rank";
    }
  }
}

// Two forwards, one backward, as DPO does (chosen and rejected); naive: counting finishes after the
// first.
TEST_P_ON_RANKS(BackwardOnRanks, TwoForwardsThenOneBackward, GetParam()) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  for (int step = 0; step < 3; ++step) {
    model.handle.zero_grad();
    const auto loss_of = [&](auto&& forward, int rank) {
      const auto chosen = squares(forward(input_of(rank, step, kWidth)));
      const auto rejected = squares(forward(input_of(rank + 50, step, kWidth)));
      return chosen * 0.5 - rejected * 0.25;
    };
    backward(loss_of([&](const at::Tensor& x) { return model.handle.forward(x); }, world.rank()));
    expect_same(whole_gradients(model.handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  backward(loss_of([&](const at::Tensor& x) { return plain.forward(x); }, rank));
                }));
    EXPECT_EQ(model.handle.unit()->expected(), 0);
  }
}

TEST_P_ON_RANKS(BackwardOnRanks, TwoForwardsThenTwoBackwardsInEitherOrder, GetParam()) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  for (const bool first_first : {true, false}) {
    model.handle.zero_grad();
    const auto one = squares(model.handle.forward(input_of(world.rank(), 0, kWidth)));
    const auto two = squares(model.handle.forward(input_of(world.rank(), 1, kWidth)));
    backward(first_first ? one : two);
    backward(first_first ? two : one);
    const auto only = [&](int step) {
      return [&plain, step](int rank) {
        backward(squares(plain.forward(input_of(rank, step, kWidth))));
      };
    };
    expect_same(
        whole_gradients(model.handle),
        each_alone(plain, world.size(), {only(first_first ? 0 : 1), only(first_first ? 1 : 0)}));
  }
}

/// Compares sums that are formed in another order.
void expect_near(const Tensors& found, const Tensors& expected) {
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto difference = (found.at(name) - value).norm() / value.norm();
    EXPECT_LT(difference.item<double>(), 1e-6) << name;
  }
}

/// Truncated back-propagation through time: the second backward continues into the first forward's
/// graph, which was retained. `run(forward, rank)` is one step.
void expect_gradients_of_plain_steps(
    World& world, int replicas,
    const std::function<void(const std::function<at::Tensor(const at::Tensor&)>&, int rank)>& run) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world, replicas), 1, 2, kWidth);
  for (int step = 0; step < 2; ++step) {
    model.handle.zero_grad();
    run([&](const at::Tensor& x) { return model.handle.forward(x); }, world.rank());
    expect_near(whole_gradients(model.handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  run([&](const at::Tensor& x) { return plain.forward(x); }, rank);
                }));
    // Nothing is left behind for an ordinary step.
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), 5, kWidth))));
    expect_same(whole_gradients(model.handle),
                gradients_of_squares(plain, world.size(), 5, kWidth, replicas));
    EXPECT_EQ(model.handle.unit()->expected(), 0);
  }
}

class BackwardOnLayouts : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, BackwardOnLayouts, every_data_layout(), name_of);

// Naive: the newer forward's marker reduces the unit; what the older forward adds then stays in
// slots that are not reduced, until the next step takes it.
TEST_P_ON_RANKS(BackwardOnLayouts, OneBackwardOverASettledForwardAndANewerOne, GetParam()) {
  expect_gradients_of_plain_steps(world, GetParam().replicas, [](const auto& forward, int rank) {
    const auto h = forward(input_of(rank, 0, kWidth));
    backward_and_keep_graph(squares(h));
    backward(squares(forward(h)));
  });
}

/// Two blocks, between which something runs on the way back.
class Interrupted : public Chain {
 public:
  Interrupted() : Chain(1, 2, kWidth) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto middle = call(0, x * scale);
    if (between) {
      middle.register_hook([act = between](const at::Tensor& grad) {
        act();
        return grad;
      });
    }
    return call(1, middle);
  }
  std::function<void()> between;
};

// Naive: a backward that meets the older forward takes the newer one for finished, and reduces
// units that are still to get gradients.
TEST_P_ON_RANKS(BackwardOnLayouts, ABackwardOverAnOlderForwardInTheMiddleOfANewerOne, GetParam()) {
  const auto replicas = GetParam().replicas;
  const auto nested = [](Interrupted& module, const auto& forward, int rank) {
    const auto older = squares(forward(input_of(rank, 0, kWidth)));
    module.between = [older] { backward(older); };
    const auto newer = squares(forward(input_of(rank, 1, kWidth)));
    module.between = nullptr;
    backward(newer);
  };
  Interrupted plain;
  auto module = std::make_shared<Interrupted>();
  module->shard_blocks(data_mesh(world, replicas));
  auto handle = fully_shard(module, data_mesh(world, replicas));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    nested(*module, [&](const at::Tensor& x) { return handle.forward(x); }, world.rank());
    expect_near(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  nested(plain, [&](const at::Tensor& x) { return plain.forward(x); }, rank);
                }));
  }
}

TEST_P_ON_RANKS(BackwardOnLayouts, OneBackwardOverTwoSettledForwardsAndANewerOne, GetParam()) {
  expect_gradients_of_plain_steps(world, GetParam().replicas, [](const auto& forward, int rank) {
    const auto h = forward(input_of(rank, 0, kWidth));
    backward_and_keep_graph(squares(h));
    const auto g = forward(h);
    backward_and_keep_graph(squares(g));
    backward(squares(forward(g)));
  });
}

TEST_ON_RANKS(Backward, AUnitWhoseResultOneRankDoesNotUse, 2) {
  Chain plain(1, 2, kWidth);
  auto chain = std::make_shared<Chain>(1, 2, kWidth);
  chain->shard_blocks(data_mesh(world));
  struct Last : torch::nn::Module {
    explicit Last(std::shared_ptr<Chain> c) : chain(register_module("chain", std::move(c))) {}
    std::vector<at::Tensor> forward(const at::Tensor& x) {
      const auto y = x * chain->scale;
      const auto z = chain->call(0, y);
      return {z, chain->call(1, z)};
    }
    std::shared_ptr<Chain> chain;
  };
  auto handle = fully_shard(std::make_shared<Last>(chain), data_mesh(world));
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    const auto results = handle.forward(input_of(world.rank(), step, kWidth));
    backward(squares(results[world.rank() == 0 ? 1 : 0]));
    Tensors expected;
    Last same(std::make_shared<Chain>(1, 2, kWidth));
    expected = plain_gradients(same, 2, 2, [&](int rank) {
      backward(squares(same.forward(input_of(rank, step, kWidth))[rank == 0 ? 1 : 0]));
    });
    expect_same(whole_gradients(handle), expected);
    for (const auto& view : handle.shards())
      EXPECT_TRUE(view.shard.grad().defined()) << view.contract->name;
  }
}

// Naive: right on one rank; on several the graph of the gradients reads parameters that are sharded
// again, and the error says nothing of it.
TEST(Backward, CreateGraphIsRefusedByNameOnEveryLayout) {
  for (const auto& [count, replicas] : {std::pair{1, 1}, {2, 1}, {2, 2}}) {
    for (const bool of_input : {false, true}) {
      const auto errors = errors_of(count, [&](World& world) {
        ShardOptions options;
        options.name = "block";
        auto handle = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world, replicas),
                                  {}, options);
        const auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
        const auto loss = squares(handle.forward(x));
        if (of_input) {
          const auto slope = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
          backward(squares(slope.front()));
        } else {
          torch::autograd::backward({loss}, {}, true, /*create_graph=*/true);
        }
      });
      EXPECT_THAT(errors, Contains(Says("unit block: found create_graph")))
          << count << " ranks, " << replicas << " replicas";
      EXPECT_THAT(errors, Each(::testing::Ne("")));
    }
  }
}

// Naive: the gradient of this rank's rows alone is returned, and nothing is reduced. Gradients of
// inputs are taken as ever.
TEST_ON_RANKS(Backward, AutogradGradOfAParameterIsNamedAndOfAnInputWorks, 1) {
  auto module = std::make_shared<Block>(1, kWidth);
  auto handle = fully_shard(module, data_mesh(world));
  auto x = input_of(0, 0, kWidth).requires_grad_();
  EXPECT_THAT(thrown_by([&] { torch::autograd::grad({squares(handle.forward(x))}, {module->a}); }),
              Says("gradient of a", "torch::autograd::grad"));
  Block plain(1, kWidth);
  EXPECT_TRUE(same_bits(torch::autograd::grad({squares(handle.forward(x))}, {x}).front(),
                        torch::autograd::grad({squares(plain.forward(x))}, {x}).front()));
}

// Handles that are called directly, not through the root that adopted them; the small buckets are
// the root's.
TEST_ON_RANKS(Backward, InnerHandlesCalledPastTheRootStillReduceWhatTheRootHolds, 2) {
  ShardOptions merge;
  merge.merge_below_bytes = 1 << 20;
  ShardedChain model(data_mesh(world), 1, 2, kWidth, {}, merge);
  Chain plain(1, 2, kWidth);
  backward(squares(model.chain->handles[0]->forward(input_of(world.rank(), 0, kWidth))));
  expect_same(whole_gradients(model.handle), plain_gradients(plain, 2, 2, [&](int rank) {
                backward(squares(plain.blocks[0]->forward(input_of(rank, 0, kWidth))));
              }));
}

}  // namespace
}  // namespace tessera::test::fsdp_backward_test
