// [Note: recomputation]: inside (unit(checkpoint(block))), outside (checkpoint(unit(block))),
// nested.

#include "dist/data_layout.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/optim.h"

namespace tessera::test::fsdp_recompute_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr int kSteps = 3;

enum class Where { kNowhere, kInside, kOutside, kBoth };

struct Run {
  Tensors gradients, parameters;
  std::int64_t gathers = 0, reductions = 0;
  int calls = 0;
};

Run train(World& world, Where where, const PrecisionPolicy& policy = {}) {
  ShardedChain model(data_mesh(world), 3, 3, kWidth, policy);
  model.chain->recomputes_outside = where == Where::kOutside || where == Where::kBoth;
  for (const auto& block : model.chain->blocks)
    block->recomputes = where == Where::kInside || where == Where::kBoth;
  const auto optimizer = make_sgd(model.handle, sgd(0.01));
  Run run;
  for (int step = 0; step < kSteps; ++step) {
    model.handle.zero_grad();
    backward(squares(model.handle.forward(input_of(world.rank(), step, kWidth))));
    run.gradients = whole_gradients(model.handle);
    optimizer->step();
    if (world.size() == 1) continue;
    EXPECT_FALSE(model.handle.unit()->gathered());
    for (const auto& handle : model.chain->handles) {
      EXPECT_FALSE(handle->unit()->gathered());
      EXPECT_EQ(handle->unit()->expected(), 0);
      EXPECT_EQ(handle->unit()->progress().open_calls, 0);
    }
  }
  run.parameters = whole_parameters(model.handle);
  run.gathers = model.handle.unit()->runtime().gathers_issued();
  run.reductions = model.handle.unit()->runtime().reductions_issued();
  for (const auto& block : model.chain->blocks) run.calls += block->calls;
  return run;
}

class Recompute : public ::testing::TestWithParam<std::tuple<int, Where>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Recompute,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(Where::kInside, Where::kOutside,
                                                              Where::kBoth)));

// Naive: the second forward gathers, records and counts again: reductions never start or start
// twice.
TEST_P_ON_RANKS(Recompute, GivesTheBitsOfThePlainCall, std::get<0>(GetParam())) {
  const auto where = std::get<1>(GetParam());
  for (const auto param_dtype : {std::optional<DType>(), std::optional(DType::kBFloat16)}) {
    PrecisionPolicy policy;
    policy.param_dtype = param_dtype;
    const auto expected = train(world, Where::kNowhere, policy);
    const auto found = train(world, where, policy);
    expect_same(found.gradients, expected.gradients);
    expect_same(found.parameters, expected.parameters);
    EXPECT_EQ(found.gathers, expected.gathers) << "recomputation gathers nothing of its own";
    EXPECT_EQ(found.reductions, expected.reductions);
    const int again = where == Where::kInside ? 0 : 3 * kSteps;
    EXPECT_EQ(found.calls, expected.calls + again) << "it was recomputed";
  }
}

/// outer handle { inner handle { block } , weight }: recomputation around handles that hold
/// handles.
class Nest : public torch::nn::Module {
 public:
  explicit Nest(std::uint64_t seed)
      : weight(register_parameter("weight", seeded(seed, {kWidth}) + 1.0)),
        block(register_module("block", std::make_shared<Block>(seed + 1, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto body = [this](const std::vector<at::Tensor>& inputs) {
      return handle ? handle->forward(inputs[0]) : block->forward(inputs[0]);
    };
    const auto y = recomputes ? checkpoint(body, {x * weight}) : body({x * weight});
    return y * weight;
  }
  at::Tensor weight;
  std::shared_ptr<Block> block;
  std::shared_ptr<Sharded<Block>> handle;
  bool recomputes = false;
};

class NestPair : public torch::nn::Module {
 public:
  NestPair()
      : first(register_module("first", std::make_shared<Nest>(1))),
        second(register_module("second", std::make_shared<Nest>(7))) {}
  void shard(const Mesh& mesh) {
    for (const auto& [name, nest, handle] :
         {std::tuple{"first", first, &one}, std::tuple{"second", second, &two}}) {
      nest->handle = std::make_shared<Sharded<Block>>(fully_shard(nest->block, mesh));
      nest->replace_module("block", nest->handle);
      *handle = std::make_shared<Sharded<Nest>>(fully_shard(nest, mesh));
      replace_module(name, *handle);
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto body = [this](const std::vector<at::Tensor>& inputs) {
      return one ? two->forward(one->forward(inputs[0]))
                 : second->forward(first->forward(inputs[0]));
    };
    return recomputes ? checkpoint(body, {x}) : body({x});
  }
  std::shared_ptr<Nest> first, second;
  std::shared_ptr<Sharded<Nest>> one, two;
  bool recomputes = false;
};

class NestedRecompute : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(Grid, NestedRecompute,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Bool(),
                                            ::testing::Bool()));

TEST_P_ON_RANKS(NestedRecompute, NestedHandlesGiveTheBitsOfThePlainModel, std::get<0>(GetParam())) {
  NestPair plain;
  auto pair = std::make_shared<NestPair>();
  pair->shard(data_mesh(world));
  pair->recomputes = std::get<1>(GetParam());
  pair->first->recomputes = pair->second->recomputes = std::get<2>(GetParam());
  auto handle = fully_shard(pair, data_mesh(world));
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
    expect_same(whole_gradients(handle), gradients_of_squares(plain, world.size(), step, kWidth),
                concat("step ", step));
  }
  EXPECT_EQ(handle.unit()->expected(), 0);
}

// Naive: the second forward draws other masks than the first, so gradients belong to no forward; or
// what is drawn after a backward depends on whether anything was recomputed.
TEST_ON_RANKS(RecomputeRandom, DropoutGivesTheBitsOfThePlainCall, 1) {
  const auto run = [&](Where where) {
    at::manual_seed(7);
    ShardedChain model(data_mesh(world), 3, 3, kWidth);
    model.chain->recomputes_outside = where == Where::kOutside || where == Where::kBoth;
    for (const auto& block : model.chain->blocks) {
      block->recomputes = where == Where::kInside || where == Where::kBoth;
      block->dropout = 0.5;
    }
    const auto optimizer = make_sgd(model.handle, sgd(0.01));
    std::vector<Tensors> seen;
    for (int step = 0; step < kSteps; ++step) {
      model.handle.zero_grad();
      backward(squares(model.handle.forward(input_of(0, step, kWidth))));
      seen.push_back(whole_gradients(model.handle));
      optimizer->step();
      seen.push_back({{"drawn afterwards", at::rand({3})}});
    }
    return seen;
  };
  const auto expected = run(Where::kNowhere);
  EXPECT_FALSE(at::equal(expected[1].at("drawn afterwards"), expected[3].at("drawn afterwards")));
  for (const auto where : {Where::kInside, Where::kOutside, Where::kBoth}) {
    const auto found = run(where);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expect_same(found[i], expected[i], concat("where ", static_cast<int>(where), ", ", i));
    }
  }
}

TEST(RecomputeRandom, AnExceptionInTheSecondForwardLeavesTheRandomNumbersWhereTheyWere) {
  at::manual_seed(7);
  int calls = 0;
  const auto y = checkpoint(
      [&](const auto& inputs) {
        if (calls++ > 0) throw std::runtime_error("the second time");
        return at::dropout(inputs[0], 0.5, true);
      },
      {here(at::ones({8})).requires_grad_()});
  EXPECT_THAT(thrown_by([&] { backward(y.sum()); }), Says("the second time"));
  const auto after = at::rand({3});
  at::manual_seed(7);
  (void)at::dropout(here(at::ones({8})), 0.5, true);
  EXPECT_TRUE(at::equal(after, at::rand({3})));
}

TEST_ON_RANKS(RecomputeErrors, AFunctionThatCallsOtherUnitsTheSecondTimeIsNamed, 1) {
  ShardedChain model(data_mesh(world), 3, 2, kWidth);
  int calls = 0;
  const auto x = input_of(0, 0, kWidth).requires_grad_();
  const auto y = checkpoint(
      [&](const auto& inputs) {
        return model.chain->handles[calls++ == 0 ? 0 : 1]->forward(inputs[0]);
      },
      {x});
  EXPECT_THAT(thrown_by([&] { backward(squares(y)); }), Says("deterministic"));
}

TEST_ON_RANKS(RecomputeMore, WithoutGradInputsAndInsideNoGrad, 2) {
  Chain plain(3, 1, kWidth);
  auto block = std::make_shared<Block>(13, kWidth);
  auto handle = fully_shard(block, data_mesh(world));
  const auto x = input_of(world.rank(), 0, kWidth);
  const auto run = [&](const std::vector<at::Tensor>& inputs) { return handle.forward(inputs[0]); };
  backward(squares(checkpoint(run, {x})));
  Block same(13, kWidth);
  expect_same(whole_gradients(handle), gradients_of_squares(same, 2, 0, kWidth));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(same_bits(checkpoint(run, {x}), same.forward(x)));
}

TEST_ON_RANKS(RecomputeMore, ABackwardTwiceOverARetainedGraph, 2) {
  ShardedChain model(data_mesh(world), 3, 2, kWidth);
  model.chain->recomputes_outside = true;
  Chain plain(3, 2, kWidth);
  const auto loss = squares(model.handle.forward(input_of(world.rank(), 0, kWidth)));
  backward_and_keep_graph(loss);
  const auto once = whole_gradients(model.handle);
  expect_same(once, gradients_of_squares(plain, 2, 0, kWidth));
  backward(loss);
  for (const auto& [name, gradient] : whole_gradients(model.handle)) {
    EXPECT_TRUE(same_bits(gradient, once.at(name) * 2)) << name;
  }
}

// Naive: the nested backward gives every parameter inside its gradient, which was not asked for and
// the next step takes.
class RecomputeRefusals : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, RecomputeRefusals, every_data_layout(), name_of);

TEST_P(RecomputeRefusals, ABackwardTowardsChosenTensorsLeavesNoGradient) {
  const auto layout = GetParam();
  RankBarrier meeting(layout.ranks);
  std::vector<std::string> told(static_cast<std::size_t>(layout.ranks));
  ranks(layout).run([&](World& world) {
    RankBarrier::Seat seat(meeting);
    for (const bool outside : {false, true}) {
      ShardedChain model(data_mesh(world, layout.replicas), 3, 2, kWidth);
      model.chain->recomputes_outside = outside;
      for (const auto& block : model.chain->blocks) block->recomputes = !outside;
      seat.wait();  // the first refusal ends what others are still at
      const auto x = input_of(world.rank(), 0, kWidth).requires_grad_();
      const auto loss = [&] { return squares(model.handle.forward(x)); };
      const auto expect_refusal = [&](const std::function<void()>& run) {
        told[static_cast<std::size_t>(world.rank())] = thrown_by(run);
        seat.wait();
        // One that is elsewhere in its backward is told that another's has ended.
        const auto refused = Says("checkpoint: found torch::autograd::grad");
        EXPECT_THAT(told, Each(AnyOf(refused, Says("an exception left a backward"))));
        EXPECT_THAT(told, Contains(refused));
        seat.wait();
        if (world.size() > 1) world.recover();
      };
      expect_refusal([&] { torch::autograd::grad({loss()}, {x}); });
      expect_refusal([&] { torch::autograd::backward({loss()}, {}, std::nullopt, false, {x}); });
      EXPECT_FALSE(x.grad().defined());
      backward(loss());
      Chain plain(3, 2, kWidth);
      expect_same(whole_gradients(model.handle),
                  gradients_of_squares(plain, world.size(), 0, kWidth, layout.replicas));
    }
  });
}

// Without a unit around that could have kept it for the next step.
TEST(RecomputeErrors, ABackwardTowardsChosenTensorsIsRefusedOutsideOfUnits) {
  Block plain(3, kWidth);
  plain.recomputes = true;
  const auto x = input_of(0, 0, kWidth).requires_grad_();
  EXPECT_THAT(thrown_by([&] { torch::autograd::grad({squares(plain.forward(x))}, {x}); }),
              Says("expected a backward() without inputs"));
  EXPECT_FALSE(plain.a.grad().defined());
}

// Naive: the first run makes a forward whose graph is dropped, and the second one is told to be
// deterministic, which it is.
TEST(RecomputeErrors, GradModeThatTheFunctionLeavesOnOverAUnitsCallIsNamed) {
  const auto run = [](World& world, bool ends) {
    auto handle = fully_shard(std::make_shared<Block>(13, kWidth), data_mesh(world));
    const auto y = checkpoint(
        [&](const auto& inputs) {
          auto grad_mode = std::make_optional<at::AutoGradMode>(true);
          const auto z = inputs[0].detach().requires_grad_();
          const auto slope = torch::autograd::grad({z.pow(2).sum()}, {z}).front();
          if (ends) grad_mode.reset();
          return handle.forward(inputs[0] + slope);
        },
        {input_of(world.rank(), 0, kWidth)});
    backward(squares(y));
    return whole_gradients(handle);
  };
  for (const int count : {1, 2}) {
    const auto errors = errors_of(count, [&](World& world) { run(world, false); });
    EXPECT_THAT(errors, Contains(Says("found grad mode switched on")));
    EXPECT_THAT(errors, Each(::testing::Ne("")));
    ranks(count).run([&](World& world) {
      Block plain(13, kWidth);
      const auto expected = plain_gradients(plain, count, count, [&](int rank) {
        const auto x = input_of(rank, 0, kWidth);
        backward(squares(plain.forward(x + 2.0 * x)));
      });
      expect_same(run(world, true), expected);
    });
  }
}

TEST(RecomputeErrors, CreateGraphIsRefusedOutsideOfUnits) {
  Block plain(3, kWidth);
  plain.recomputes = true;
  const auto loss = squares(plain.forward(input_of(0, 0, kWidth)));
  EXPECT_THAT(
      thrown_by([&] { torch::autograd::backward({loss}, {}, true, /*create_graph=*/true); }),
      Says("backward: found create_graph"));
}

// Naive: the change is in no history, and the second run makes it once more: also in an input that
// requires no grad, with which the weights' gradients are computed.
TEST(RecomputeErrors, AnInputThatTheFunctionChangesInPlaceIsRefusedByItsNumber) {
  const auto x = input_of(0, 0, kWidth).requires_grad_() * 1.0;
  const auto run = [&](const at::Tensor& first, const at::Tensor& input) {
    return thrown_by([&] {
      checkpoint([](const auto& inputs) { return inputs[1].mul_(2.0) + 1.0; }, {first, input});
    });
  };
  for (const auto& input : {x, here(at::ones({3})), x.detach().narrow(0, 0, 1)}) {
    for (const auto& first : {at::Tensor(), here(at::ones({3}))}) {
      EXPECT_THAT(run(first, input), Says("checkpoint: found that argument 1"));
    }
  }
  EXPECT_EQ(thrown_by([&] {
              checkpoint([](const auto& inputs) { return inputs[0].clone().mul_(2.0); },
                         {here(at::ones({3}))});
            }),
            "");
}

// Naive: the gradient of the first run's result is expanded to the second one's.
TEST(RecomputeErrors, ResultsOfOtherSizesOrDtypesTheSecondTimeAreNamed) {
  const auto second = [](const std::function<at::Tensor(const at::Tensor&)>& change) {
    int calls = 0;
    const auto results = checkpoint(
        [&](const std::vector<at::Tensor>& inputs) -> std::vector<at::Tensor> {
          const auto y = inputs[0] * 2.0;
          return {inputs[0] + 1.0, calls++ == 0 ? y : change(y)};
        },
        {here(at::ones({3, 2})).requires_grad_()});
    return thrown_by([&] { backward(squares(results[0]) + squares(results[1])); });
  };
  EXPECT_THAT(second([](const at::Tensor& y) { return y.sum(0, true); }),
              Says("found result 1 as [1, 2] Float, expected [3, 2] Float"));
  EXPECT_THAT(second([](const at::Tensor& y) { return y.to(at::kDouble); }),
              Says("found result 1 as [3, 2] Double, expected [3, 2] Float"));
  EXPECT_THAT(second([](const at::Tensor&) { return at::Tensor(); }),
              Says("found result 1 undefined, expected [3, 2] Float"));
  EXPECT_EQ(second([](const at::Tensor& y) { return y; }), "");
}

}  // namespace
}  // namespace tessera::test::fsdp_recompute_test
