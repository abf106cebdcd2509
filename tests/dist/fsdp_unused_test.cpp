// [Note: unused] and [Note: shared across units].
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_unused_test {
namespace {

constexpr std::int64_t kWidth = 7;

/// `some` is used by rank `user` only (-1: by none, -2: by all); `always` by all.
class Partly : public torch::nn::Module {
 public:
  explicit Partly(int who) : user(who) {}
  at::Tensor forward(const at::Tensor& x, int rank) {
    const auto y = x * always;
    return user == -2 || user == rank ? y + some : y;
  }
  at::Tensor always = register_parameter("always", seeded(1, {kWidth}));
  at::Tensor some = register_parameter("some", seeded(2, {kWidth}));
  int user;
};

at::Tensor grad_of(const ShardedBase& handle, const std::string& name) {
  for (const auto& view : handle.shards()) {
    if (view.contract->name == name) return view.shard.grad();
  }
  return {};
}

class UnusedOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, UnusedOnRanks, ::testing::Values(1, 2, 3));

// Naive: ranks without the gradient skip the reduction (a hang), or have no gradient where others
// have one.
TEST_P_ON_RANKS(UnusedOnRanks, UsedOnOneRankHasAGradientEverywhere, GetParam()) {
  const int user = world.size() - 1;
  Partly plain(user);
  auto handle = fully_shard(std::make_shared<Partly>(user), data_mesh(world));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth), world.rank())));
    expect_same(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  backward(squares(plain.forward(input_of(rank, step, kWidth), rank)));
                }));
    EXPECT_TRUE(grad_of(handle, "some").defined());
  }
}

// Naive: a gradient of zeros: weight decay, momentum and Adam's averages move what no rank used.
TEST_P_ON_RANKS(UnusedOnRanks, UsedOnNoRankHasNoGradientAndIsNotStepped, GetParam()) {
  for (const bool adam : {true, false}) {
    auto handle = fully_shard(std::make_shared<Partly>(-1), data_mesh(world));
    const auto before = whole_parameters(handle);
    const auto optimizer =
        adam ? make_adamw(handle, adamw(0.1, 0.5)) : make_sgd(handle, sgd(0.1, 0.9, 0.5));
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      backward(squares(handle.forward(input_of(world.rank(), step, kWidth), world.rank())));
      EXPECT_FALSE(grad_of(handle, "some").defined());
      optimizer->step();
    }
    const auto after = whole_parameters(handle);
    EXPECT_TRUE(same_bits(after.at("some"), before.at("some")));
    EXPECT_FALSE(at::equal(after.at("always"), before.at("always")));
  }
}

TEST_P_ON_RANKS(UnusedOnRanks, UsedInOneStepAndNotInTheNext, GetParam()) {
  auto module = std::make_shared<Partly>(-2);
  auto handle = fully_shard(module, data_mesh(world));
  backward(squares(handle.forward(input_of(world.rank(), 0, kWidth), world.rank())));
  EXPECT_TRUE(grad_of(handle, "some").defined());
  handle.zero_grad();
  module->user = -1;
  backward(squares(handle.forward(input_of(world.rank(), 1, kWidth), world.rank())));
  EXPECT_FALSE(grad_of(handle, "some").defined()) << "the old one must not come back";
  EXPECT_TRUE(at::equal(whole_gradients(handle).at("some"), here(at::zeros({kWidth}))));
  // Without zero_grad the gradient of the step before stays, as unsharded.
  module->user = -2;
  backward(squares(handle.forward(input_of(world.rank(), 2, kWidth), world.rank())));
  const auto kept = whole_gradients(handle).at("some");
  module->user = -1;
  backward(squares(handle.forward(input_of(world.rank(), 3, kWidth), world.rank())));
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("some"), kept));
}

// --------------------------------------------------------------- results that a backward leaves
// out

/// x * weight, as users write functions: an undefined gradient comes as zeros, and gives zeros.
struct OwnScale : torch::autograd::Function<OwnScale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

using Pair = std::pair<at::Tensor, at::Tensor>;

/// Two results, of which the second is a user's own function of `some`.
struct TwoWays : torch::nn::Module {
  Pair forward(const at::Tensor& x) { return {x * always, OwnScale::apply(x, some)}; }
  at::Tensor always = register_parameter("always", seeded(1, {kWidth}));
  at::Tensor some = register_parameter("some", seeded(2, {kWidth}));
};

/// The first of two arguments is used.
struct First : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, const at::Tensor&) { return x * always; }
  at::Tensor always = register_parameter("always", seeded(3, {kWidth}));
};

/// A user's own function makes an argument that the unit inside does not use.
struct Feeds : torch::nn::Module {
  explicit Feeds(const Mesh& mesh)
      : inside(register_module("inside", std::make_shared<Sharded<First>>(
                                             fully_shard(std::make_shared<First>(), mesh)))) {}
  at::Tensor forward(const at::Tensor& x) {
    return inside->forward(x * always, OwnScale::apply(x, some));
  }
  at::Tensor always = register_parameter("always", seeded(1, {kWidth}));
  at::Tensor some = register_parameter("some", seeded(2, {kWidth}));
  std::shared_ptr<Sharded<First>> inside;
};

/// Two steps through `use` leave `some` as it was, and move `always`.
template <class Module, class Use>
void expect_some_left_out(Sharded<Module>& handle, int rank, const Use& use) {
  const auto before = whole_parameters(handle);
  const auto optimizer = make_adamw(handle, adamw(0.1, 0.5));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(use(input_of(rank, step, kWidth)));
    EXPECT_FALSE(grad_of(handle, "some").defined());
    optimizer->step();
  }
  const auto after = whole_parameters(handle);
  EXPECT_TRUE(same_bits(after.at("some"), before.at("some")));
  EXPECT_FALSE(at::equal(after.at("always"), before.at("always")));
}

// Naive: one node stands behind all results, so autograd runs what is behind each of them, and a
// function that is given zeros for what is undefined has its weights decayed.
TEST_P_ON_RANKS(UnusedOnRanks, AnOwnFunctionBehindAResultThatIsLeftOutDoesNotRun, GetParam()) {
  auto handle = fully_shard(std::make_shared<TwoWays>(), data_mesh(world));
  expect_some_left_out(handle, world.rank(),
                       [&](const at::Tensor& x) { return squares(handle.forward(x).first); });
}

TEST_P_ON_RANKS(UnusedOnRanks, AnOwnFunctionBehindAnArgumentThatIsLeftOutDoesNotRun, GetParam()) {
  const auto mesh = data_mesh(world);
  auto handle = fully_shard(std::make_shared<Feeds>(mesh), mesh);
  expect_some_left_out(handle, world.rank(),
                       [&](const at::Tensor& x) { return squares(handle.forward(x)); });
}

// The last rank alone uses the second result: all others have its gradient, too.
TEST_P_ON_RANKS(UnusedOnRanks, AResultThatOneRankUsesHasItsGradientEverywhere, GetParam()) {
  const auto use = [](const Pair& both, bool all) {
    return all ? squares(both.first) + squares(both.second) : squares(both.first);
  };
  TwoWays plain;
  auto handle = fully_shard(std::make_shared<TwoWays>(), data_mesh(world));
  const int user = world.size() - 1;
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    const auto both = handle.forward(input_of(world.rank(), step, kWidth));
    backward(use(both, world.rank() == user));
    expect_same(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  backward(use(plain.forward(input_of(rank, step, kWidth)), rank == user));
                }));
  }
}

// One backward a result, over one kept graph: the gradients of both, once each.
TEST_P_ON_RANKS(UnusedOnRanks, ABackwardForEachResultGivesBothGradients, GetParam()) {
  TwoWays plain;
  auto handle = fully_shard(std::make_shared<TwoWays>(), data_mesh(world));
  const auto run = [](const Pair& both) {
    backward_and_keep_graph(squares(both.first));
    backward(squares(both.second));
  };
  run(handle.forward(input_of(world.rank(), 0, kWidth)));
  expect_same(whole_gradients(handle),
              plain_gradients(plain, world.size(), world.size(),
                              [&](int rank) { run(plain.forward(input_of(rank, 0, kWidth))); }));
}

// -------------------------------------------------------------------------------------- sharing

/// Two blocks with one weight tensor object in both: an output head tied to an embedding, say.
class Shares : public torch::nn::Module {
 public:
  explicit Shares(std::uint64_t seed, const at::Tensor& shared)
      : own(register_parameter("own", seeded(seed, {kWidth}))),
        weight(register_parameter("weight", shared)) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(at::linear(x * own, weight)); }
  at::Tensor own, weight;
};

class Tied : public torch::nn::Module {
 public:
  Tied() {
    const auto shared = seeded(5, {kWidth, kWidth});
    first = register_module("first", std::make_shared<Shares>(6, shared));
    second = register_module("second", std::make_shared<Shares>(7, first->weight));
  }
  void shard(const Mesh& mesh, const PrecisionPolicy& policy = {}) {
    one = std::make_shared<Sharded<Shares>>(fully_shard(first, mesh, policy));
    two = std::make_shared<Sharded<Shares>>(fully_shard(second, mesh, policy));
    replace_module("first", one);
    replace_module("second", two);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (!one) return second->forward(at::relu(first->forward(x)));
    return two->forward(at::relu(one->forward(x)));
  }
  std::shared_ptr<Shares> first, second;
  std::shared_ptr<Sharded<Shares>> one, two;
};

// Naive: the unit that owns it releases it while the other still needs it, or both reduce half of
// it.
TEST_P_ON_RANKS(UnusedOnRanks, OneTensorInTwoUnitsMovesToTheirCommonAncestor, GetParam()) {
  Tied plain;
  auto module = std::make_shared<Tied>();
  module->shard(data_mesh(world));
  auto handle = fully_shard(module, data_mesh(world));
  EXPECT_EQ(handle.unit()->parameters().size(), 1U);
  EXPECT_EQ(module->one->unit()->parameters().size(), 1U);
  EXPECT_EQ(module->two->unit()->parameters().size(), 1U);
  const auto optimizer = make_sgd(handle, sgd(0.25));
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
    auto expected = gradients_of_squares(plain, world.size(), step, kWidth);
    expected.erase("second.weight");  // named_parameters() shows the tensor under both names
    expect_same(whole_gradients(handle), expected, concat("step ", step));
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (const auto& [name, gradient] : expected)
      plain.named_parameters()[name].add_(gradient, -0.25);
  }
  auto values = whole_parameters(handle);
  for (auto& [name, value] : values)
    EXPECT_TRUE(same_bits(value, plain.named_parameters()[name].detach())) << name;
}

// 256 by one unit, 1 by the other, in bf16: naive, autograd's own sum is 256.
TEST(SharedAcrossUnits, UsesOfTwoUnitsAddUnrounded) {
  struct Use : torch::nn::Module {
    explicit Use(const at::Tensor& w) : weight(register_parameter("weight", w)) {}
    at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
    at::Tensor weight;
  };
  struct Both : torch::nn::Module {
    std::shared_ptr<Sharded<Use>> one, two;
    at::Tensor forward(const at::Tensor& x) { return one->forward(x * 256) + two->forward(x); }
  };
  ranks(2).run([](World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = DType::kFloat32;
    const auto bf16 = at::TensorOptions().dtype(at::kBFloat16);
    auto first = std::make_shared<Use>(here(at::ones({3}, bf16)));
    auto second = std::make_shared<Use>(first->weight);
    auto both = std::make_shared<Both>();
    both->one = both->register_module(
        "one", std::make_shared<Sharded<Use>>(fully_shard(first, data_mesh(world), policy)));
    both->two = both->register_module(
        "two", std::make_shared<Sharded<Use>>(fully_shard(second, data_mesh(world), policy)));
    auto handle = fully_shard(both, data_mesh(world), policy);
    backward(handle.forward(here(at::ones({3}, bf16))));
    EXPECT_TRUE(same_bits(whole_gradients(handle).at("one.weight"), here(at::full({3}, 257.0F))));
  });
}

// 1 by the root, 256 by the unit, -256 by the root after it. Naive: what the root does with the
// tensor is one use for autograd with what the unit does, whose own sum is 0.
TEST(SharedAcrossUnits, UsesOfAUnitAndOfTheCodeAroundItAddUnrounded) {
  struct Use : torch::nn::Module {
    explicit Use(const at::Tensor& w) : weight(register_parameter("weight", w)) {}
    at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
    at::Tensor weight;
  };
  struct Around : torch::nn::Module {
    explicit Around(const at::Tensor& w) : weight(register_parameter("weight", w)) {}
    at::Tensor forward(const at::Tensor& x) {
      const auto before = (x * weight).sum();
      const auto inside = unit->forward(x * 256);
      return before + inside + (x * -256 * weight).sum();
    }
    at::Tensor weight;
    std::shared_ptr<Sharded<Use>> unit;
  };
  ranks(2).run([](World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = DType::kFloat32;
    const auto bf16 = at::TensorOptions().dtype(at::kBFloat16);
    auto inside = std::make_shared<Use>(here(at::ones({3}, bf16)));
    auto around = std::make_shared<Around>(inside->weight);
    around->unit = around->register_module(
        "unit", std::make_shared<Sharded<Use>>(fully_shard(inside, data_mesh(world), policy)));
    auto handle = fully_shard(around, data_mesh(world), policy);
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      backward(handle.forward(here(at::ones({3}, bf16))));
      const auto found = whole_gradients(handle);
      ASSERT_EQ(found.size(), 1U);
      EXPECT_TRUE(same_bits(found.begin()->second, here(at::full({3}, 1.0F)))) << step;
    }
  });
}

TEST_P(UnusedOnRanks, AWeightThatTheRootUsesToo) {
  struct Head : torch::nn::Module {
    explicit Head(std::shared_ptr<Block> b)
        : block(register_module("block", std::move(b))),
          weight(register_parameter("weight", block->a)) {}
    at::Tensor forward(const at::Tensor& x) {
      const auto y = handle ? handle->forward(x) : block->forward(x);
      return at::linear(y, weight);
    }
    std::shared_ptr<Block> block;
    at::Tensor weight;
    std::shared_ptr<Sharded<Block>> handle;
  };
  ranks(GetParam()).run([](World& world) {
    Head plain(std::make_shared<Block>(4, kWidth));
    auto head = std::make_shared<Head>(std::make_shared<Block>(4, kWidth));
    head->handle = std::make_shared<Sharded<Block>>(fully_shard(head->block, data_mesh(world)));
    head->replace_module("block", head->handle);
    auto handle = fully_shard(head, data_mesh(world));
    for (int step = 0; step < 3; ++step) {
      handle.zero_grad();
      backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
      const auto expected = gradients_of_squares(plain, world.size(), step, kWidth);
      const auto found = whole_gradients(handle);
      EXPECT_EQ(found.size(), 2U);
      EXPECT_TRUE(same_bits(found.at("block.a"), expected.at("weight")));
      EXPECT_TRUE(same_bits(found.at("block.b"), expected.at("block.b")));
    }
  });
}

TEST_P(UnusedOnRanks, SharedButNeverAdoptedIsNamedAtTheFirstForward) {
  const auto errors = errors_of(GetParam(), [](World& world) {
    Tied tied;
    tied.shard(data_mesh(world));
    tied.two->forward(seeded(1, {2, kWidth}));
  });
  EXPECT_THAT(errors, Contains(Says("weight", "common parent", "fully_shard")));
  EXPECT_THAT(errors, Not(Contains("")));
}

TEST_ON_RANKS(SharedAcrossUnits, TiedStorageInTwoCallsOfFullyShardIsRefused, 2) {
  const auto value = seeded(1, {kWidth, kWidth});
  auto first = std::make_shared<Shares>(1, value);
  auto second = std::make_shared<Shares>(2, value.detach());
  auto one = fully_shard(first, data_mesh(world));
  EXPECT_THAT(thrown_by([&] { auto two = fully_shard(second, data_mesh(world)); }),
              Says("shard tied parameters in one call"));
}

}  // namespace
}  // namespace tessera::test::fsdp_unused_test
