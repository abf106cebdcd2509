// [Note: release]: when unsharded memory is there, and what answers when it is not.
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <latch>
#include <thread>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_lifetime_test {
namespace {

constexpr std::int64_t kWidth = 6;

/// A frozen base weight in bf16 and two trainable adapters: y = base x + up down x.
class Lora : public torch::nn::Module {
 public:
  explicit Lora(std::uint64_t seed)
      : base(register_parameter("base", seeded(seed, {kWidth, kWidth}, at::kBFloat16),
                                /*requires_grad=*/false)),
        down(register_parameter("down", seeded(seed + 1, {2, kWidth}))),
        up(register_parameter("up", seeded(seed + 2, {kWidth, 2}))) {}
  at::Tensor forward(const at::Tensor& x) {
    // The base comes first in forward, so its use in backward is the unit's last: all adapter
    // gradients are in.
    const auto y = at::linear(x.to(at::kBFloat16), base).to(x.scalar_type());
    return y + at::linear(at::linear(y, down), up);
  }
  at::Tensor base, down, up;
};

class LoraPair : public torch::nn::Module {
 public:
  explicit LoraPair(std::uint64_t seed)
      : first(register_module("first", std::make_shared<Lora>(seed))),
        second(register_module("second", std::make_shared<Lora>(seed + 5))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!one) return second->forward(first->forward(x));
    return two->forward(one->forward(x));
  }
  void shard(const Mesh& mesh) {
    one = std::make_shared<Sharded<Lora>>(fully_shard(first, mesh));
    two = std::make_shared<Sharded<Lora>>(fully_shard(second, mesh));
    replace_module("first", one);
    replace_module("second", two);
  }
  std::shared_ptr<Lora> first, second;
  std::shared_ptr<Sharded<Lora>> one, two;
};

class LifetimeOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LifetimeOnRanks, ::testing::Values(1, 2, 3));

// Naive: released when the last gradient arrived, so the base's last use reads freed memory or
// throws.
TEST_P_ON_RANKS(LifetimeOnRanks, AdaptersOnAFrozenBaseTrainAsUnsharded, GetParam()) {
  LoraPair plain(3);
  auto pair = std::make_shared<LoraPair>(3);
  pair->shard(data_mesh(world));
  auto handle = fully_shard(pair, data_mesh(world));
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    auto x = input_of(world.rank(), step, kWidth).requires_grad_();
    backward(squares(handle.forward(x)));
    expect_same(whole_gradients(handle), gradients_of_squares(plain, world.size(), step, kWidth));
    auto y = input_of(world.rank(), step, kWidth).requires_grad_();
    backward(squares(plain.forward(y)));
    EXPECT_TRUE(same_bits(x.grad(), y.grad())) << "what flows through the base";
  }
  for (const auto& view : handle.shards()) {
    if (view.contract->name.find("base") != std::string::npos) {
      EXPECT_FALSE(view.shard.grad().defined());
    }
  }
}

// Naive: released at the last gradient: between the adapters' gradients and the base's use it is
// gone.
TEST_ON_RANKS(Lifetime, BaseIsGatheredUntilTheMarkerAndReleasedThere, 2) {
  auto pair = std::make_shared<LoraPair>(3);
  pair->shard(data_mesh(world));
  auto handle = fully_shard(pair, data_mesh(world));
  auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
  const auto y = handle.forward(x * 1.0);
  EXPECT_FALSE(pair->one->unit()->gathered()) << "resharded after forward";
  bool seen = false;
  // Runs when the gradient leaves `second` towards `first`: second's marker has run.
  const auto loss = squares(y);
  x.register_hook([&](const at::Tensor& grad) {
    seen = true;
    EXPECT_FALSE(pair->two->unit()->gathered());
    EXPECT_FALSE(pair->one->unit()->gathered());
    return grad;
  });
  backward(loss);
  EXPECT_TRUE(seen);
}

TEST_ON_RANKS(Lifetime, PeakMemoryIsTheRootAndTwoUnitsNotTheModel, 2) {
  ShardOptions small_flight;
  small_flight.in_flight_bytes = 1;
  ShardedChain model(data_mesh(world), 1, 12, 32, {}, small_flight);
  for (int step = 0; step < 2; ++step) {
    backward(squares(model.handle.forward(input_of(world.rank(), step, 32))));
    model.handle.zero_grad();
  }
  const std::int64_t block_bytes = 2 * 33 * 32 * 4;
  // Gathered: this block and the next; gradients: the one that arrives and the one on the wire.
  EXPECT_LE(model.handle.unit()->runtime().pool()->total_bytes(), 6 * block_bytes);
}

// ------------------------------------------------------------------------ touching what is
// released

// Naive: a segfault, or another unit's weights.
TEST_ON_RANKS(Lifetime, ReadingAndWritingAReleasedParameterNamesTheUnit, 2) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto& weight = model.chain->blocks[1]->a;
  const auto message = Says("block1", "while they are sharded");
  const at::NoGradGuard no_grad;
  for (int round = 0; round < 2; ++round) {
    EXPECT_THAT(thrown_by([&] { (void)weight.sum(); }), message);
    EXPECT_THAT(thrown_by([&] { weight.add_(1); }), message);
    EXPECT_THAT(thrown_by([&] { (void)weight.clone(); }), message);
    EXPECT_THAT(thrown_by([&] { (void)weight[0][0].item<float>(); }), message);
    EXPECT_THAT(thrown_by([&] { (void)weight.data_ptr<float>(); }), message);
    model.handle.forward(input_of(world.rank(), 0, kWidth));
  }
}

TEST_ON_RANKS(Lifetime, OneRankThatCastsReleasesAsWell, 1) {
  auto module = std::make_shared<Block>(1, kWidth);
  auto handle = fully_shard(module, data_mesh(world), in_bfloat16());
  EXPECT_THAT(thrown_by([&] { (void)module->a.sum(); }), Says("while they are sharded"));
}

// Naive: torch::optim on the module's own parameters steps nothing, silently, for ever.
TEST_P_ON_RANKS(LifetimeOnRanks, AnOptimizerOnTheModulesOwnParametersIsNamed, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  torch::optim::SGD wrong(std::vector<at::Tensor>{model.chain->blocks[0]->a},
                          torch::optim::SGDOptions(0.1));
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_THAT(thrown_by([&] { wrong.step(); }), Says("parameter", "what fully_shard returned"));
}

TEST_P_ON_RANKS(LifetimeOnRanks, AClipOfTheModulesOwnParametersIsNamed, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  const auto message = Says("gradient of the unsharded parameter a", "give parameters() of");
  EXPECT_THAT(
      thrown_by([&] { torch::nn::utils::clip_grad_norm_({model.chain->blocks[0]->a}, 1.0); }),
      message);
  EXPECT_THAT(thrown_by([&] { (void)model.chain->blocks[0]->a.grad().norm(); }), message);
}

TEST_P_ON_RANKS(LifetimeOnRanks, TorchOptimOnTheShardsWorks, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth), other(data_mesh(world), 1, 2, kWidth);
  torch::optim::SGD theirs(static_cast<torch::nn::Module&>(model.handle).parameters(),
                           torch::optim::SGDOptions(0.1));
  const auto ours = make_sgd(other.handle, sgd(0.1));
  for (int step = 0; step < 2; ++step) {
    for (auto* each : {&model, &other}) {
      each->handle.zero_grad();
      backward(squares(each->handle.forward(input_of(world.rank(), step, kWidth))));
    }
    theirs.step();
    ours->step();
  }
  expect_same(whole_parameters(model.handle), whole_parameters(other.handle));
}

// Naive: the module computes with any values that lie there.
TEST_ON_RANKS(Lifetime, CallingAModulePastItsHandleThrowsAtTheReleasedParameter, 2) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  EXPECT_THAT(thrown_by([&] { model.chain->blocks[0]->forward(input_of(0, 0, kWidth)); }),
              Says("block0", "call what fully_shard returned"));
}

// One rank that computes in its storage dtype is never released: the gradient is what gives it
// away.
TEST_ON_RANKS(Lifetime, CallingAModulePastItsHandleOnOneRankThrowsAtItsGradient, 1) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto error = thrown_by(
      [&] { backward(squares(model.chain->blocks[0]->forward(input_of(0, 0, kWidth)))); });
  EXPECT_THAT(error, Says("block0.b", "outside an open forward", "call what fully_shard returned"));
  model.handle.zero_grad();
  backward(squares(model.handle.forward(input_of(0, 0, kWidth))));  // and the model continues
  Chain plain(1, 2, kWidth);
  expect_same(whole_gradients(model.handle), gradients_of_squares(plain, 1, 0, kWidth));
}

TEST_P_ON_RANKS(LifetimeOnRanks, StepWhileABackwardIsPendingIsRefused, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto optimizer = make_sgd(model.handle, {});
  {
    const auto loss = squares(model.handle.forward(input_of(world.rank(), 0, kWidth)));
    EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("whose backward has not run"));
  }
  optimizer->step();  // the loss went out of scope
}

// Pending losses are counted when any thread releases a graph. Naive: a plain count loses some of
// them, and no step is taken any more.
TEST(Lifetime, LossesThatOtherThreadsDropAreNotPending) {
  constexpr std::size_t kThreads = 4;
  ranks(1).run([](World& world) {
    ShardedChain model(data_mesh(world), 1, 2, kWidth);
    const auto optimizer = make_sgd(model.handle, {});
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<at::Tensor>> losses(kThreads);
      for (auto& of_thread : losses) {
        for (int i = 0; i < 16; ++i) {
          of_thread.push_back(squares(model.handle.forward(input_of(0, i, kWidth))));
        }
      }
      EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("whose backward has not run"));
      std::latch all(kThreads);
      std::vector<std::jthread> threads;
      for (auto& of_thread : losses) {
        threads.emplace_back([&all, &of_thread] {
          all.arrive_and_wait();
          of_thread.clear();
        });
      }
      threads.clear();  // joins
      ASSERT_NO_THROW(optimizer->step());
    }
  });
}

// Naive: the root stays gathered after a forward without a backward, and computes on with old
// weights.
TEST_P_ON_RANKS(LifetimeOnRanks, AForwardThatIsDroppedDoesNotKeepOldWeights, GetParam()) {
  const auto policy = in_bfloat16();  // one rank gathers as well
  ShardedChain model(data_mesh(world), 1, 2, kWidth, policy);
  const auto x = input_of(0, 0, kWidth);
  backward(squares(model.handle.forward(x)));
  const auto before = model.handle.forward(x).detach();  // say, to log it
  const auto optimizer = make_sgd(model.handle, sgd(0.5));
  optimizer->step();
  const auto scale = whole_parameters(model.handle).at("scale");
  ShardedChain fresh(data_mesh(world), 1, 2, kWidth, policy);
  {
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> values;
    auto theirs = fresh.handle.named_parameters();
    for (const auto& entry : model.handle.named_parameters())
      theirs[entry.key()].copy_(entry.value());
  }
  EXPECT_TRUE(same_bits(model.handle.forward(x).detach(), fresh.handle.forward(x).detach()));
  EXPECT_FALSE(at::equal(before, model.handle.forward(x).detach()));
}

// Naive: the second backward gathers the new weights under the first forward's saved tensors.
TEST_P_ON_RANKS(LifetimeOnRanks, ABackwardThroughWeightsThatHaveChangedSinceIsRefused, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto optimizer = make_sgd(model.handle, sgd(0.5));
  const auto y = model.handle.forward(input_of(world.rank(), 0, kWidth));
  backward_and_keep_graph(y.sum());
  optimizer->step();
  EXPECT_THAT(thrown_by([&] { backward(squares(y)); }), Says("changed since this forward"));
}

// Naive: the kept graph keeps the root gathered, and its old weights serve the next forward.
TEST_P_ON_RANKS(LifetimeOnRanks, AKeptGraphAndTorchOptimDoNotKeepOldWeights, GetParam()) {
  const auto policy = in_bfloat16();  // one rank gathers as well
  ShardedChain model(data_mesh(world), 1, 2, kWidth, policy),
      other(data_mesh(world), 1, 2, kWidth, policy);
  torch::optim::SGD theirs(static_cast<torch::nn::Module&>(model.handle).parameters(),
                           torch::optim::SGDOptions(0.5));
  const auto ours = make_sgd(other.handle, sgd(0.5));
  const auto x = input_of(0, 0, kWidth);
  for (auto* each : {&model, &other}) backward(squares(each->handle.forward(x)));
  const auto kept = model.handle.forward(x);  // with its graph
  theirs.step();
  ours->step();
  EXPECT_TRUE(same_bits(model.handle.forward(x).detach(), other.handle.forward(x).detach()));
}

TEST_P_ON_RANKS(LifetimeOnRanks, EvaluationBetweenForwardAndBackwardDisturbsNothing, GetParam()) {
  Chain plain(1, 2, kWidth);
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  for (int step = 0; step < 3; ++step) {
    model.handle.zero_grad();
    const auto loss = squares(model.handle.forward(input_of(world.rank(), step, kWidth)));
    {
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(same_bits(model.handle.forward(input_of(7, step, kWidth)),
                            plain.forward(input_of(7, step, kWidth)).detach()));
    }
    backward(loss);
    expect_same(whole_gradients(model.handle),
                gradients_of_squares(plain, world.size(), step, kWidth));
    const at::NoGradGuard no_grad;
    model.handle.forward(input_of(world.rank(), step, kWidth));
    if (world.size() == 1) continue;
    EXPECT_FALSE(model.handle.unit()->gathered()) << "evaluation gives all memory back";
    for (const auto& inner : model.chain->handles) EXPECT_FALSE(inner->unit()->gathered());
  }
}

TEST_P_ON_RANKS(LifetimeOnRanks, TheGraphMayOutliveTheHandle, GetParam()) {
  auto model = std::make_unique<ShardedChain>(data_mesh(world), 1, 2, kWidth);
  auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
  const auto loss = squares(model->handle.forward(x));
  const auto chain = model->chain;
  model.reset();
  chain->handles.clear();
  backward(loss);
  Chain plain(1, 2, kWidth);
  auto y = input_of(world.rank(), 0, kWidth).requires_grad_();
  backward(squares(plain.forward(y)));
  EXPECT_TRUE(same_bits(x.grad(), y.grad()));
}

// Naive: the module's tensors show freed memory once the handle is gone.
TEST_P_ON_RANKS(LifetimeOnRanks, TheModuleOutlivesItsHandleAsAnErrorNotAsFreedMemory, GetParam()) {
  auto module = std::make_shared<Block>(1, kWidth);
  {
    auto handle = fully_shard(module, data_mesh(world));
    handle.forward(input_of(0, 0, kWidth));
  }
  EXPECT_THAT(thrown_by([&] { (void)module->a.sum(); }), Says("while they are sharded"));
}

TEST_ON_RANKS(Lifetime, ATensorThatSharedStorageWithAParameterThrowsAfterSharding, 2) {
  auto module = std::make_shared<Block>(1, kWidth);
  const auto outside = module->a.detach();
  auto handle = fully_shard(module, data_mesh(world));
  EXPECT_THAT(thrown_by([&] { (void)outside.sum(); }), Says("parameter a", "clone values"));
}

TEST_ON_RANKS(Lifetime, UnshardAndReshardByHand, 2) {
  auto module = std::make_shared<Block>(1, kWidth);
  const auto value = module->a.detach().clone();
  auto handle = fully_shard(module, data_mesh(world));
  handle.unshard();
  EXPECT_TRUE(same_bits(module->a.detach(), value));
  handle.reshard();
  EXPECT_THAT(thrown_by([&] { (void)module->a.sum(); }), Says("while they are sharded"));
}

}  // namespace
}  // namespace tessera::test::fsdp_lifetime_test
