// Ranks that use results differently: what is issued is the same on all of them, the gradients are
// the sum of what each rank used, and no rank waits for another. [Note: collective order]

#include "dist/data_layout.h"
#include "proof.h"
#include "support/plain.h"
#include "support/quotient.h"
#include "support/test.h"

namespace tessera::test::fsdp_dropped_test {
namespace {

constexpr std::int64_t kWidth = 5;

class Dropped : public ::testing::TestWithParam<DataLayout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, Dropped, every_data_layout(), name_of);

using Pair = std::pair<at::Tensor, at::Tensor>;

std::shared_ptr<Affine> affine(std::uint64_t seed) {
  return std::make_shared<Affine>(seed, kWidth, kWidth);
}

/// Two results of three units: left(trunk) and right(trunk).
template <class Unit>
struct Branches : torch::nn::Module {
  template <class Make>
  explicit Branches(const Make& make)
      : trunk(register_module("trunk", make(affine(1)))),
        left(register_module("left", make(affine(3)))),
        right(register_module("right", make(affine(5)))) {}
  Pair forward(const at::Tensor& x) {
    const auto y = trunk->forward(x);
    auto l = left->forward(y);
    return {l, right->forward(y)};
  }
  std::shared_ptr<Unit> trunk, left, right;
};

using Plain = Branches<Affine>;
using Units = Branches<Sharded<Affine>>;

struct Model {
  Model(World& world, int replicas, std::int64_t in_flight = std::int64_t{32} << 20,
        bool reshards = true)
      : handle(shard(data_mesh(world, replicas), in_flight, reshards)) {}
  static Sharded<Units> shard(const Mesh& mesh, std::int64_t in_flight, bool reshards) {
    ShardOptions options;
    options.in_flight_bytes = in_flight;
    auto inner = options;
    inner.reshard_after_forward = reshards;
    auto module = std::make_shared<Units>([&](std::shared_ptr<Affine> unit) {
      return std::make_shared<Sharded<Affine>>(fully_shard(std::move(unit), mesh, {}, inner));
    });
    return fully_shard(std::move(module), mesh, {}, options);
  }
  Pair forward(int rank, int i) { return handle.forward(input_of(rank, i, kWidth)); }
  Sharded<Units> handle;
};

/// Sums over ranks and micro-batches of what `use` takes, over the number of ranks, in fp64.
Tensors plain(int ranks, int micro_batches,
              const std::function<at::Tensor(int rank, int i, const Pair& both)>& use) {
  Plain module([](std::shared_ptr<Affine> unit) { return unit; });
  Tensors sums;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto raw = raw_gradients(module, [&] {
      for (int i = 0; i < micro_batches; ++i) {
        const auto loss = use(rank, i, module.forward(input_of(rank, i, kWidth)));
        if (loss.defined()) backward(loss);
      }
    });
    for (const auto& [name, gradient] : raw) {
      auto& sum = sums[name];
      sum = sum.defined() ? sum + gradient.to(at::kDouble) : gradient.to(at::kDouble);
    }
  }
  for (auto& [name, sum] : sums) sum = over(sum, ranks);
  return sums;
}

/// A few fp32 additions in another order; zeros where no rank used a parameter.
void expect_close(const Tensors& found, const Tensors& expected, const std::string& what) {
  for (const auto& [name, value] : found) {
    EXPECT_TRUE(expected.count(name) > 0 || !value.any().item<bool>()) << what << " " << name;
  }
  for (const auto& [name, value] : expected) {
    ASSERT_EQ(found.count(name), 1U) << what << " lacks " << name;
    const auto bound = 1e-5 * (1e-3 + value.abs().max().item<double>());
    const auto error = (found.at(name).to(at::kDouble) - value).abs().max().item<double>();
    EXPECT_LE(error, bound) << what << " " << name;
  }
}

bool drops(int rank, int i) { return rank == i % 2; }

/// One rank drops the left branch, the next one the right.
at::Tensor some(int rank, int i, const Pair& both) {
  if (drops(rank, i)) return squares(both.first);
  return squares(both.first) + squares(both.second);
}

// Naive: a rank gathers and reduces what its own graph needs.
TEST_P_ON_RANKS(Dropped, ABranchInEachStep, GetParam()) {
  for (const bool reshards : {true, false}) {
    Model model(world, GetParam().replicas, 32 << 20, reshards);
    for (int step = 0; step < 3; ++step) {
      model.handle.zero_grad();
      backward(some(world.rank(), 0, model.forward(world.rank(), 0)));
      expect_close(whole_gradients(model.handle), plain(world.size(), 1, some),
                   concat("step ", step));
    }
  }
}

// Naive: the second step dies, since one rank still has the second forward's last unit in memory.
TEST_P_ON_RANKS(Dropped, ABranchOfOneOfTwoForwardsWithABackwardEach, GetParam()) {
  Model model(world, GetParam().replicas);
  for (int step = 0; step < 3; ++step) {
    model.handle.zero_grad();
    const auto first = some(world.rank(), 0, model.forward(world.rank(), 0));
    const auto second = some(world.rank(), 1, model.forward(world.rank(), 1));
    backward(first);
    backward(second);
    expect_close(whole_gradients(model.handle), plain(world.size(), 2, some),
                 concat("step ", step));
  }
}

// Naive: with reductions above the budget one rank waits for a reduction that the others, which
// wait for it to agree on the older forward, have not come to.
TEST_P_ON_RANKS(Dropped, ABranchOfTwoForwardsInOneBackwardAboveTheBudget, GetParam()) {
  for (const std::int64_t budget : {1, 200, 1 << 20}) {
    Model model(world, GetParam().replicas, budget);
    for (int step = 0; step < 2; ++step) {
      model.handle.zero_grad();
      const auto first = model.forward(world.rank(), 0);
      const auto second = model.forward(world.rank(), 1);
      backward(some(world.rank(), 0, first) + some(world.rank(), 1, second));
      expect_close(whole_gradients(model.handle), plain(world.size(), 2, some),
                   concat("budget ", budget, ", step ", step));
    }
  }
}

// Naive: only the ranks that come to the newer forward tell each other its order.
TEST_P_ON_RANKS(Dropped, AWholeForwardThatOneRankDoesNotUse, GetParam()) {
  const auto use = [](int rank, int i, const auto& both) {
    return i == 1 && rank == 0 ? at::Tensor() : squares(both.first) + squares(both.second);
  };
  for (const bool keeps : {false, true}) {
    Model model(world, GetParam().replicas, 1);
    for (int step = 0; step < 2; ++step) {
      model.handle.zero_grad();
      auto first = model.forward(world.rank(), 0);
      auto second = model.forward(world.rank(), 1);
      auto loss = use(world.rank(), 0, first);
      if (const auto more = use(world.rank(), 1, second); more.defined()) loss = loss + more;
      if (!keeps) second = {};
      backward(loss);
      expect_close(whole_gradients(model.handle), plain(world.size(), 2, use),
                   concat("step ", step));
    }
  }
}

// Naive: a rank that keeps a graph also keeps memory, and gathers less than the others.
TEST_P_ON_RANKS(Dropped, AGraphThatOneRankKeepsAcrossEvaluationsAndSteps, GetParam()) {
  for (const bool stays : {false, true}) {
    Model model(world, GetParam().replicas, 32 << 20, /*reshards=*/false);
    if (stays) model.handle.set_reshard_after_backward(false);
    std::vector<at::Tensor> kept;
    for (int step = 0; step < 3; ++step) {
      model.handle.zero_grad();
      const auto both = model.forward(world.rank(), 0);
      if (world.rank() == 0) kept.push_back(both.second);
      {
        const at::NoGradGuard no_grad;
        model.forward(world.rank(), 1);
      }
      backward(some(world.rank(), 0, both));
      expect_close(whole_gradients(model.handle), plain(world.size(), 1, some),
                   concat("step ", step));
    }
  }
}

// Naive: the trace of a forward that no rank differentiates is kept for good, or is forgotten on
// one rank while another still needs it.
TEST_P_ON_RANKS(Dropped, ThousandsOfForwardsOfWhichOneRankKeepsTheFirst, GetParam()) {
  Model model(world, GetParam().replicas);
  auto first = model.forward(world.rank(), 0);
  if (world.rank() != 0) first.first = at::Tensor();
  const int forwards = place().device == "cpu" || full_proof() ? 1100 : 50;
  for (int i = 0; i < forwards; ++i) model.forward(world.rank(), 1);
  const auto use = [](int rank, int, const auto& both) {
    return rank == 0 ? squares(both.first) + squares(both.second) : squares(both.second);
  };
  backward(use(world.rank(), 0, first));
  expect_close(whole_gradients(model.handle), plain(world.size(), 1, use), "first");
}

/// Runs one of its units, or all of them.
struct Growing : torch::nn::Module {
  explicit Growing(const Mesh& mesh) {
    for (int i = 0; i < 3; ++i) {
      units.push_back(register_module(
          concat("unit", i), std::make_shared<Sharded<Affine>>(fully_shard(
                                 std::make_shared<Affine>(10 + i, kWidth, kWidth), mesh))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < count; ++i) x = units[i]->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<Sharded<Affine>>> units;
  std::size_t count = 2;
};

// Naive: the unit that came last before keeps its memory through all that follows, and the one that
// comes last now is taken for it.
TEST_P_ON_RANKS(Dropped, AForwardThatIsLongerOrShorterThanTheOneBefore, GetParam()) {
  const auto mesh = data_mesh(world, GetParam().replicas);
  auto module = std::make_shared<Growing>(mesh);
  auto handle = fully_shard(module, mesh);
  const std::vector<std::shared_ptr<Affine>> units = {std::make_shared<Affine>(10, 5, 5),
                                                      std::make_shared<Affine>(11, 5, 5),
                                                      std::make_shared<Affine>(12, 5, 5)};
  for (const std::size_t length : {2U, 3U, 3U, 1U, 2U, 3U}) {
    handle.zero_grad();
    module->count = length;
    backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
    Tensors sums;
    for (int rank = 0; rank < world.size(); ++rank) {
      for (const auto& unit : units) unit->zero_grad();
      auto x = input_of(rank, 0, kWidth);
      for (std::size_t i = 0; i < length; ++i) x = units[i]->forward(x);
      backward(squares(x));
      for (std::size_t i = 0; i < length; ++i) {
        auto& sum = sums[concat("unit", i, ".weight")];
        const auto gradient = over(units[i]->weight.grad().to(at::kDouble), world.size());
        sum = sum.defined() ? sum + gradient : gradient;
      }
    }
    auto found = whole_gradients(handle);
    std::erase_if(found, [](const auto& one) { return one.first.ends_with("bias"); });
    expect_close(found, sums, concat("length ", length));
  }
}

/// Keeps something that its caller may differentiate, and does not return it.
struct Keeping : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", seeded(5, {kWidth}));
  at::Tensor kept;
  at::Tensor forward(const at::Tensor& x) {
    kept = (x * weight).sum();
    return x * weight;
  }
};

// Naive: they are not reduced, and the next step adds them to its own.
TEST(DroppedResults, GradientsThatNoneAnnouncesAreRefused) {
  for (const int count : {1, 2, 3}) {
    const auto errors = errors_of(count, [](World& world) {
      auto module = std::make_shared<Keeping>();
      auto handle = fully_shard(module, data_mesh(world));
      const auto unused = handle.forward(input_of(world.rank(), 0, kWidth));
      backward(module->kept);
    });
    EXPECT_THAT(errors, Contains(Says("return from a forward")));
  }
}

TEST(DroppedResults, AKeptResultNextToAUsedOneIsPartOfTheStep) {
  for (const int count : {1, 2, 3}) {
    ranks(count).run([](World& world) {
      auto module = std::make_shared<Keeping>();
      auto handle = fully_shard(module, data_mesh(world));
      const auto y = handle.forward(input_of(world.rank(), 0, kWidth));
      backward(y.sum() + module->kept);
      const auto twice = whole_gradients(handle).at("weight");
      handle.zero_grad();
      backward(handle.forward(input_of(world.rank(), 0, kWidth)).sum() * 2);
      EXPECT_TRUE(at::allclose(twice, whole_gradients(handle).at("weight")));
    });
  }
}

// Naive: both models have the same units and have run alike, so one rank's backward of the first is
// reduced into the other's of the second.
TEST_P(Dropped, BackwardsOfTwoModelsThatMeetAreNamed) {
  const auto layout = GetParam();
  if (layout.ranks == 1) return;
  std::vector<std::string> errors(static_cast<std::size_t>(layout.ranks));
  ranks(layout).run([&](World& world) {
    Model one(world, layout.replicas), other(world, layout.replicas);
    const auto x = input_of(world.rank(), 0, kWidth);
    const auto of_one = one.handle.forward(x).first;
    const auto of_other = other.handle.forward(x).first;
    errors[static_cast<std::size_t>(world.rank())] =
        thrown_by([&] { backward(squares(world.rank() == 0 ? of_one : of_other)); });
  });
  // One that comes to it later hears that another's backward has ended.
  EXPECT_THAT(errors, Each(Not(std::string())));
  EXPECT_THAT(errors, Contains(Says("backwards of different models meet", "model ")));
}

}  // namespace
}  // namespace tessera::test::fsdp_dropped_test
