// Parameters of every kind: shapes, strides, dtypes, frozen ones, a leaf's own grad_dtype, ignored
// ones.

#include "dist/data_layout.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_parameters_test {
namespace {

/// One of each.
class Odd : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    auto y = x * scalar + one + empty.sum() + prime.sum() * x;
    y = y + (strided * here(at::arange(15)).reshape({5, 3})).sum() + integer.sum();
    y = y + half.to(at::kFloat).pow(2).sum() + wide.to(at::kFloat).sum() * x +
        frozen.to(at::kFloat).sum();
    return y;
  }
  at::Tensor scalar = register_parameter("scalar", seeded(1, {}));
  at::Tensor empty = register_parameter("empty", here(at::zeros({0, 3})));
  at::Tensor one = register_parameter("one", seeded(2, {1}));
  at::Tensor prime = register_parameter("prime", seeded(3, {7, 19}));
  at::Tensor strided = register_parameter("strided", seeded(4, {3, 5}).t());
  at::Tensor integer = register_parameter("integer", here(at::tensor({3, 1, 2})), false);
  at::Tensor half = register_parameter("half", seeded(5, {11}, at::kBFloat16));
  at::Tensor wide = register_parameter("wide", seeded(6, {13}, at::kDouble));
  at::Tensor frozen = register_parameter("frozen", seeded(7, {5}, at::kBFloat16), false);
};

class ParametersOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ParametersOnRanks, ::testing::Values(1, 2, 3, 4));

TEST_P_ON_RANKS(ParametersOnRanks, EveryShapeAndDtypeTrainsAsUnsharded, GetParam()) {
  Odd plain;
  // Sharded parameters are contiguous; sums over strided ones are formed in another order.
  plain.strided.set_data(plain.strided.contiguous());
  auto handle = fully_shard(std::make_shared<Odd>(), data_mesh(world), without_master());
  const auto before = whole_parameters(handle);
  EXPECT_EQ(before.size(), 9U);
  for (const auto& entry : plain.named_parameters()) {
    EXPECT_TRUE(same_bits(before.at(entry.key()), entry.value().detach())) << entry.key();
  }
  const auto optimizer = make_sgd(handle, sgd(0.125));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    const auto loss = squares(handle.forward(input_of(world.rank(), step, 1)));
    EXPECT_TRUE(
        same_bits(loss.detach(), squares(plain.forward(input_of(world.rank(), step, 1))).detach()));
    backward(loss);
    // fp64 parameters are summed in fp64.
    Tensors sums;
    for (int rank = 0; rank < world.size(); ++rank) {
      for (const auto& [name, raw] : raw_gradients(
               plain, [&] { backward(squares(plain.forward(input_of(rank, step, 1)))); })) {
        const auto wide = raw.to(name == "wide" ? at::kDouble : at::kFloat);
        sums[name] = sums[name].defined() ? sums[name] + wide : wide;
      }
    }
    const auto found = whole_gradients(handle);
    EXPECT_EQ(found.size(), 7U);
    const at::NoGradGuard no_grad;
    for (const auto& [name, sum] : sums) {
      const auto parameter = plain.named_parameters()[name];
      const auto expected = over(sum, world.size()).to(parameter.scalar_type());
      EXPECT_TRUE(same_bits(found.at(name), expected)) << name;
      parameter.add_(expected, -0.125);
    }
    optimizer->step();
  }
  const auto after = whole_parameters(handle);
  for (const auto& entry : plain.named_parameters()) {
    EXPECT_TRUE(same_bits(after.at(entry.key()), entry.value().detach())) << entry.key();
  }
}

TEST_P(ParametersOnRanks, AModuleWithoutParametersIsAUnitToo) {
  struct Nothing : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x * 2; }
  };
  ranks(GetParam()).run([](World& world) {
    auto handle = fully_shard(std::make_shared<Nothing>(), data_mesh(world));
    auto x = seeded(1, {3}).requires_grad_();
    backward(handle.forward(x).sum());
    EXPECT_TRUE(same_bits(x.grad(), here(at::full({3}, 2.0F))));
  });
}

TEST_P(ParametersOnRanks, OnlyEmptyParameters) {
  struct Hollow : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x + empty.sum(); }
    at::Tensor empty = register_parameter("empty", here(at::zeros({0})));
  };
  ranks(GetParam()).run([](World& world) {
    auto handle = fully_shard(std::make_shared<Hollow>(), data_mesh(world));
    const auto optimizer = make_adamw(handle, {});
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      backward(handle.forward(seeded(1, {3})).sum());
      EXPECT_TRUE(handle.shards()[0].shard.grad().defined());
      optimizer->step();
    }
  });
}

// Naive: an empty tensor in two modules is taken for two parameters, one of which never has a
// gradient.
TEST_P(ParametersOnRanks, OneEmptyTensorInTwoModulesIsOneParameter) {
  struct Twice : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x * weight + empty.sum(); }
    at::Tensor weight = register_parameter("weight", seeded(1, {3}));
    at::Tensor empty = register_parameter("empty", here(at::zeros({0, 3})));
    at::Tensor again = register_parameter("again", empty);
  };
  ranks(GetParam()).run([](World& world) {
    auto handle = fully_shard(std::make_shared<Twice>(), data_mesh(world));
    backward(squares(handle.forward(seeded(2, {3}))));
    EXPECT_EQ(handle.shards().size(), 2U);
    for (const auto& view : handle.shards())
      EXPECT_TRUE(view.shard.grad().defined()) << view.contract->name;
  });
}

// Frozen is decided when a model is sharded; a later change is an error, not a gradient that is
// never reduced.
TEST_P(ParametersOnRanks, AFrozenParameterThatIsUnfrozenAfterShardingIsRefusedAtItsGradient) {
  const auto errors = errors_of(GetParam(), [](World& world) {
    auto module = std::make_shared<Odd>();
    auto handle = fully_shard(module, data_mesh(world));
    module->frozen.set_requires_grad(true);
    backward(squares(handle.forward(seeded(1, {1}))));
  });
  EXPECT_THAT(errors, Contains(Says("frozen", "before sharding")));
  EXPECT_THAT(errors, Not(Contains("")));
}

TEST_ON_RANKS(Parameters, FrozenByARuleAndTrainedByARule, 2) {
  PrecisionPolicy policy;
  PrecisionRule freeze, train;
  freeze.match = {"prime"};
  freeze.frozen = FrozenRule::kYes;
  train.match = {"frozen"};
  train.frozen = FrozenRule::kNo;
  policy.rules = {freeze, train};
  auto handle = fully_shard(std::make_shared<Odd>(), data_mesh(world), policy);
  backward(squares(handle.forward(seeded(1, {1}))));
  const auto found = whole_gradients(handle);
  EXPECT_EQ(found.count("prime"), 0U);
  ASSERT_EQ(found.count("frozen"), 1U);
  EXPECT_GT(found.at("frozen").to(at::kFloat).abs().sum().item<float>(), 0);
}

TEST_ON_RANKS(Parameters, ALeafsOwnGradDtypeRoundsOnArrival, 2) {
  const double fine = 1.0 + 1.0 / 1024;
  for (const bool own : {false, true}) {
    auto module = std::make_shared<Scale>(here(at::ones({3})));
    if (own) module->weight.set_grad_dtype(at::kBFloat16);
    auto handle = fully_shard(module, data_mesh(world));
    backward((handle.forward(here(at::ones({3}))) * fine).sum());
    EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                          here(at::full({3}, static_cast<float>(own ? 1.0 : fine)))));
  }
}

// Naive: what autograd calls the default, and a user who asks for the same, cannot be told apart;
// or none is taken for a dtype.
TEST_ON_RANKS(Parameters, ALeafsOwnGradDtypeCountsAlsoWhereItIsTheTensorsAndNoneRoundsNothing, 2) {
  const double fine = 1.0 + 1.0 / 1024;
  const auto gradient = [&](const std::function<void(at::Tensor&)>& set) {
    auto module = std::make_shared<Scale>(here(at::ones({3}, at::kBFloat16)));
    set(module->weight);
    auto handle = fully_shard(module, data_mesh(world));
    backward((handle.forward(here(at::ones({3}))) * fine).sum());
    return whole_gradients(handle).at("weight");
  };
  const auto unrounded = here(at::full({3}, static_cast<float>(fine)));
  EXPECT_TRUE(same_bits(gradient([](at::Tensor&) {}), unrounded));
  EXPECT_TRUE(
      same_bits(gradient([](at::Tensor& w) { w.set_grad_dtype(std::nullopt); }), unrounded));
  EXPECT_TRUE(same_bits(gradient([](at::Tensor& w) { w.set_grad_dtype(at::kBFloat16); }),
                        here(at::ones({3}))));
}

TEST_ON_RANKS(Parameters, AGradientBeforeShardingIsRefused, 1) {
  auto module = std::make_shared<Scale>(here(at::ones({3})));
  backward(module->forward(here(at::ones({3}))).sum());
  EXPECT_THAT(thrown_by([&] { fully_shard(module, data_mesh(world)); }),
              Says("weight", "zero_grad()"));
}

TEST_ON_RANKS(Parameters, WithoutValuesOnTheMetaDeviceAreRefusedByName, 1) {
  auto module = std::make_shared<Scale>(at::ones({3}, at::TensorOptions(at::kMeta)));
  EXPECT_THAT(thrown_by([&] { fully_shard(module, data_mesh(world)); }),
              Says("parameter weight: found it on meta, expected ", world.device().str()));
}

struct After : torch::autograd::PostAccumulateGradHook {
  void operator()(const at::Tensor&) override {}
};
struct Pass : torch::autograd::FunctionPreHook {
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& grads) override {
    return grads;
  }
};
struct PassAfter : torch::autograd::FunctionPostHook {
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>&) override {
    return outputs;
  }
};

/// Every way to put a hook on a leaf.
std::vector<std::function<void(const at::Tensor&)>> hooks_on_a_leaf() {
  namespace impl = torch::autograd::impl;
  return {
      [](const at::Tensor& b) { b.register_hook([](const at::Tensor& grad) { return grad * 2; }); },
      [](const at::Tensor& b) { impl::set_post_acc_grad_hooks(b, std::make_unique<After>()); },
      [](const at::Tensor& b) {
        impl::grad_accumulator(b)->add_pre_hook(std::make_unique<Pass>());
      },
      [](const at::Tensor& b) {
        impl::grad_accumulator(b)->add_post_hook(std::make_unique<PassAfter>());
      },
  };
}

class HooksBeforeSharding : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, HooksBeforeSharding, every_data_layout(), name_of);

// Naive: an assert of libtorch, or a hook that is never called again.
TEST_P_ON_RANKS(HooksBeforeSharding, AreRefusedByNameOnAllRanks, GetParam()) {
  const auto replicas = GetParam().replicas;
  const auto mesh = data_mesh(world, replicas);
  for (const auto& hook : hooks_on_a_leaf()) {
    auto block = std::make_shared<Block>(1, 4);
    // Lives as long as somebody holds it.
    const auto node = torch::autograd::impl::grad_accumulator(block->b);
    hook(block->b);
    EXPECT_THAT(thrown_by([&] { fully_shard(block, mesh); }), Says("parameter b", "hook"));
  }
  auto block = std::make_shared<Block>(1, 4);
  const auto node = torch::autograd::impl::grad_accumulator(block->b);
  auto handle = fully_shard(block, mesh);
  backward(squares(handle.forward(input_of(world.rank(), 0, 4))));
  Block plain(1, 4);
  expect_same(whole_gradients(handle), gradients_of_squares(plain, world.size(), 0, 4, replicas),
              "no hook, no refusal");
}

TEST_ON_RANKS(Parameters, OfAnotherHandleAreRefused, 1) {
  auto twice = std::make_shared<Block>(1, 4);
  auto handle = fully_shard(twice, data_mesh(world));
  EXPECT_THAT(thrown_by([&] { fully_shard(twice, data_mesh(world)); }),
              Says("another handle has sharded"));
}

// Naive: libtorch's register_hook drops ours, and gradients go where they are never reduced.
TEST_ON_RANKS(Parameters, AHookOnTheModulesTensorIsRefusedByName, 1) {
  auto block = std::make_shared<Block>(1, 4);
  auto handle = fully_shard(block, data_mesh(world));
  const auto loss = [&] { return squares(handle.forward(input_of(world.rank(), 0, 4))); };
  backward(loss());
  handle.zero_grad();
  const auto late = loss();
  block->b.register_hook([](const at::Tensor& grad) { return grad * 2; });
  EXPECT_THAT(thrown_by([&] { backward(late); }), Says("parameter b", "hook"));
  EXPECT_THAT(thrown_by([&] { loss(); }), Says("parameter b", "register_hook"));
}

TEST_ON_RANKS(Parameters, IgnoredOnesStayAsTheyAre, 2) {
  auto module = std::make_shared<Block>(1, 4);
  ShardOptions options;
  options.ignored_parameters = {module->b};
  auto handle = fully_shard(module, data_mesh(world), {}, options);
  EXPECT_EQ(handle.shards().size(), 1U);
  backward(squares(handle.forward(input_of(world.rank(), 0, 4))));
  EXPECT_TRUE(module->b.grad().defined()) << "the user's own, unreduced";
  EXPECT_EQ(module->b.grad().sizes(), module->b.sizes());
}

TEST(Parameters, SparseAndComplexGradientsAreRefusedByName) {
  class Table : public torch::nn::Module {
   public:
    at::Tensor forward(const at::Tensor& ids) {
      return at::embedding(weight, ids, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true).sum();
    }
    at::Tensor weight = register_parameter("weight", seeded(1, {4, 3}));
  };
  ranks(1).run([](World& world) {
    auto handle = fully_shard(std::make_shared<Table>(), data_mesh(world));
    EXPECT_THAT(thrown_by([&] { backward(handle.forward(here(at::tensor({1, 2})))); }),
                Says("weight", "Sparse", "dense"));
    auto complex = std::make_shared<Scale>(here(at::ones({3}, at::kComplexFloat)));
    EXPECT_NE(thrown_by([&] { fully_shard(complex, data_mesh(world)); }), "");
  });
}

// Naive: a weight tied to its transpose becomes the weight itself, or a copy that trains alone.
TEST_ON_RANKS(Parameters, OtherViewsOfOneMemoryAreRefused, 2) {
  using View = std::function<at::Tensor(const at::Tensor&)>;
  const auto refusal = [&](const View& view) {
    auto module = std::make_shared<Scale>(seeded(1, {4, 4}));
    module->register_parameter("view", view(module->weight.detach()));
    return thrown_by([&] { fully_shard(module, data_mesh(world)); });
  };
  const auto message = Says("weight and view", "same memory");
  EXPECT_THAT(refusal([](const auto& weight) { return weight.t(); }), message);
  EXPECT_THAT(refusal([](const auto& weight) { return weight.view({16}); }), message);
  EXPECT_THAT(refusal([](const auto& weight) { return weight[1]; }), message);
  EXPECT_EQ(refusal([](const auto& weight) { return weight; }), "");
}

}  // namespace
}  // namespace tessera::test::fsdp_parameters_test
