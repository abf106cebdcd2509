// Properties: a sharded module computes what the plain one does, bit for bit where the order of
// additions is the same; units may hold several dtypes; every schedule forms its sums in the
// contract's dtypes.
#include <torch/csrc/autograd/autograd.h>

#include "dist/data_layout.h"
#include "support/modules.h"
#include "support/quotient.h"
#include "tessera/clip.h"
#include "tessera/group.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::test::fsdp_basic_test {
namespace {

void backward(const at::Tensor& loss) { torch::autograd::backward({loss}, {}); }

at::Tensor mse(const at::Tensor& y, const at::Tensor& target) {
  return (y.to(at::kFloat) - target).pow(2).mean();
}

/// Plain gradients of the mean of `ranks` local losses, each rank's gradient summed in rank order
/// in fp32.
std::map<std::string, at::Tensor> plain_gradients(torch::nn::Module& module, int ranks,
                                                  const std::function<at::Tensor(int)>& loss_of) {
  std::map<std::string, at::Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    for (auto& p : module.parameters()) p.mutable_grad().reset();
    backward(loss_of(rank));
    for (const auto& entry : module.named_parameters()) {
      const auto raw = entry.value().grad();
      if (!raw.defined()) continue;
      auto& sum = sums[entry.key()];
      sum = sum.defined() ? sum + raw.to(at::kFloat) : raw.to(at::kFloat);
    }
  }
  for (auto& [name, sum] : sums) sum = over(sum, ranks);
  return sums;
}

class Layouts : public ::testing::TestWithParam<DataLayout> {};

TEST_P_ON_RANKS(Layouts, MixedDtypeModelTrainsAsThePlainOne, GetParam()) {
  const auto replicas = GetParam().replicas;
  const auto plain = std::make_shared<MixedMlp>(7);
  PrecisionPolicy policy;
  policy.optimizer.master = MasterRequest::kNone;  // bf16 shards are stepped as the plain ones
  auto handle = fully_shard(std::make_shared<MixedMlp>(7), data_mesh(world, replicas), policy);
  SgdOptions options;
  options.lr = 0.1;
  const auto optimizer = make_sgd(handle, options);
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto loss_of = [&](int rank, auto& model) {
      const auto seed = static_cast<std::uint64_t>(100 + 10 * epoch + rank);
      return mse(model.forward(seeded(seed, {4, 10})), seeded(seed + 50, {4, 10}));
    };
    const auto loss = loss_of(world.rank(), handle);
    ASSERT_TRUE(same_bits(loss.detach(), loss_of(world.rank(), *plain).detach()));
    backward(loss);
    const auto expected =
        plain_gradients(*plain, GetParam().ranks, [&](int rank) { return loss_of(rank, *plain); });
    handle.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      const auto dtype = plain->named_parameters()[name].scalar_type();
      if (replicas == 1) {
        EXPECT_TRUE(same_bits(gradient, expected.at(name).to(dtype))) << name;
      } else {
        EXPECT_TRUE(at::allclose(gradient, expected.at(name).to(dtype), 1e-5, 1e-7)) << name;
      }
    });
    optimizer->step();
    handle.zero_grad();
    {
      const at::NoGradGuard no_grad;
      for (const auto& entry : plain->named_parameters()) {
        entry.value().add_(expected.at(entry.key()).to(entry.value().scalar_type()), -0.1);
      }
    }
  }
  handle.visit_full_parameters([&](const std::string& name, const at::Tensor& value) {
    const auto reference = plain->named_parameters()[name].detach();
    if (replicas == 1) {
      EXPECT_TRUE(same_bits(value, reference)) << name;
    } else {
      EXPECT_TRUE(at::allclose(value, reference, 1e-5, 1e-6)) << name;
    }
  });
}

TEST_P_ON_RANKS(Layouts, NestedUnitsGiveTheSameBitsAsOne, GetParam()) {
  const auto mesh = data_mesh(world, GetParam().replicas);
  auto whole = fully_shard(std::make_shared<MixedMlp>(3), mesh);
  auto module = std::make_shared<MixedMlp>(3);
  // Every layer a unit of its own, called through its handle.
  struct Nested : torch::nn::Module {
    std::shared_ptr<Sharded<Affine>> a, b, c;
    at::Tensor forward(const at::Tensor& x) {
      return c->forward(at::relu(b->forward(at::relu(a->forward(x)))));
    }
  };
  auto nested = std::make_shared<Nested>();
  const auto shard = [&](const char* name, const std::shared_ptr<Affine>& layer) {
    return nested->register_module(name,
                                   std::make_shared<Sharded<Affine>>(fully_shard(layer, mesh)));
  };
  nested->a = shard("layer1", module->layer1);
  nested->b = shard("layer2", module->layer2);
  nested->c = shard("layer3", module->layer3);
  ShardOptions options;
  options.merge_below_bytes =
      200;  // layer3's bf16 bias alone is no bucket; small ones move to the root
  auto handle = fully_shard(nested, mesh, {}, options);
  const auto x = seeded(static_cast<std::uint64_t>(world.rank()), {4, 10});
  for (int step = 0; step < 3; ++step) {  // prefetch follows the agreed order from the second on
    handle.zero_grad();
    whole.zero_grad();
    const auto one = handle.forward(x);
    const auto other = whole.forward(x);
    ASSERT_TRUE(same_bits(one.detach(), other.detach()));
    backward(one.to(at::kFloat).pow(2).sum());
    backward(other.to(at::kFloat).pow(2).sum());
    std::map<std::string, at::Tensor> expected;
    whole.visit_full_gradients(
        [&](const auto& name, const auto& g) { expected[name] = g.clone(); });
    int seen = 0;
    handle.visit_full_gradients([&](const auto& name, const auto& g) {
      EXPECT_TRUE(same_bits(g, expected.at(name))) << name;
      ++seen;
    });
    EXPECT_EQ(seen, 6);
  }
}

/// Units whose activations the program measures over all ranks on the way, where it is told to.
struct Measured : torch::nn::Module {
  explicit Measured(const Mesh& mesh) {
    const MixedMlp layers(5);
    const auto unit = [&](const char* name, const std::shared_ptr<Affine>& layer) {
      return register_module(name, std::make_shared<Sharded<Affine>>(fully_shard(layer, mesh)));
    };
    first = unit("first", layers.layer1);
    second = unit("second", layers.layer2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = at::relu(first->forward(x));
    if (world != nullptr) means.push_back(world->group().mean(h.detach(), "activations"));
    return second->forward(h);
  }
  std::shared_ptr<Sharded<Affine>> first, second;
  World* world = nullptr;
  std::vector<at::Tensor> means;
};

// Naive: a collective of the program meets a gather that is under way, or waits behind one that
// another rank has not issued.
TEST_P_ON_RANKS(Layouts, CollectivesOfTheProgramMeetNothingThatIsUnderWay, GetParam()) {
  const auto run = [&](bool measures) {
    const auto mesh = data_mesh(world, GetParam().replicas);
    const auto module = std::make_shared<Measured>(mesh);
    if (measures) module->world = &world;
    auto handle = fully_shard(module, mesh);
    const auto optimizer = make_sgd(handle, {});
    std::vector<at::Tensor> results;
    for (int step = 0; step < 3; ++step) {
      const auto loss =
          handle.forward(seeded(static_cast<std::uint64_t>(10 * step + world.rank()), {3, 10}))
              .pow(2)
              .sum();
      if (measures) results.push_back(mesh.group("dp_shard").mean(loss.detach(), "loss"));
      const auto under_way = module->second->unshard_async();
      if (measures) world.group().barrier("before the backward");
      backward(loss);
      if (measures) mesh.group("dp_replicate").broadcast(loss.detach(), 0, "loss");
      optimizer->step();
      handle.zero_grad();
    }
    handle.visit_full_parameters(
        [&](const std::string&, const at::Tensor& value) { results.push_back(value.clone()); });
    if (measures) results.erase(results.begin(), results.begin() + 3);
    EXPECT_EQ(module->means.size(), measures ? 3U : 0U);
    return results;
  };
  const auto plain = run(false);
  const auto measured = run(true);
  ASSERT_EQ(plain.size(), measured.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(same_bits(plain[i], measured[i]));
}

INSTANTIATE_TEST_SUITE_P(Grid, Layouts,
                         ::testing::Values(DataLayout{1, 1}, DataLayout{2, 1}, DataLayout{3, 1},
                                           DataLayout{4, 1}, DataLayout{2, 2}, DataLayout{4, 2},
                                           DataLayout{2, 1, ThreadBackend::kGloo},
                                           DataLayout{4, 2, ThreadBackend::kGloo}),
                         name_of);

// 256, 1, -256 in bf16 is 0; the contract's sums are fp32, so every schedule must give 1.
enum class Schedule { kSynced, kNoSync, kReplicasDeferred };

struct RanksAndReplicas {
  int ranks;
  int replicas;
};

class Accumulation
    : public ::testing::TestWithParam<std::tuple<Schedule, RanksAndReplicas, at::ScalarType>> {};

TEST_P_ON_RANKS(Accumulation, TwoHundredFiftySixPlusOneMinusTwoHundredFiftySixIsOne,
                std::get<1>(GetParam()).ranks) {
  const auto [schedule, layout, storage] = GetParam();
  PrecisionPolicy policy;
  policy.param_dtype = DType::kBFloat16;
  policy.final_dtype = DType::kFloat32;
  policy.cast_forward_inputs = false;
  auto handle =
      fully_shard(std::make_shared<Scale>(here(at::ones({8}, at::TensorOptions().dtype(storage)))),
                  data_mesh(world, layout.replicas), policy);
  const double values[] = {256, 1, -256};
  for (int i = 0; i < 3; ++i) {
    const bool last = i == 2;
    handle.set_requires_gradient_sync(schedule != Schedule::kNoSync || last);
    handle.set_requires_replica_reduce(schedule != Schedule::kReplicasDeferred || last);
    const auto x = here(at::full({8}, values[i], at::TensorOptions().dtype(at::kBFloat16)));
    backward(handle.forward(x).sum());
  }
  handle.visit_full_gradients([&](const auto&, const at::Tensor& gradient) {
    EXPECT_TRUE(same_bits(gradient, here(at::ones({8}))));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Grid, Accumulation,
    ::testing::Combine(::testing::Values(Schedule::kSynced, Schedule::kNoSync,
                                         Schedule::kReplicasDeferred),
                       ::testing::Values(RanksAndReplicas{2, 1}, RanksAndReplicas{2, 2},
                                         RanksAndReplicas{3, 1}, RanksAndReplicas{4, 2}),
                       ::testing::Values(at::kFloat, at::kBFloat16)));

TEST(OneLeafAUse, TiedTensorsOfOneUnitAddUnrounded) {
  // One backward brings bf16 256 and 1 for one parameter: autograd's own sum is 256.
  struct Tied : torch::nn::Module {
    at::Tensor a, b;
    Tied() {
      const auto value = here(at::ones({4}, at::TensorOptions().dtype(at::kBFloat16)));
      a = register_parameter("a", value);
      b = register_parameter("b", value.detach());
    }
    at::Tensor forward(const at::Tensor& x) { return (a * x).sum() + (b * at::ones_like(x)).sum(); }
  };
  ranks(2).run([](World& world) {
    PrecisionPolicy policy;
    policy.final_dtype = DType::kFloat32;
    auto handle = fully_shard(std::make_shared<Tied>(), data_mesh(world), policy);
    backward(handle.forward(here(at::full({4}, 256, at::TensorOptions().dtype(at::kBFloat16)))));
    int seen = 0;
    handle.visit_full_gradients([&](const auto& name, const at::Tensor& gradient) {
      EXPECT_EQ(name, "a");
      EXPECT_TRUE(same_bits(gradient, here(at::full({4}, 257.0F))));
      ++seen;
    });
    EXPECT_EQ(seen, 1);
  });
}

TEST_ON_RANKS(OneLeafAUse, AUnitCalledTwiceAddsUnrounded, 2) {
  PrecisionPolicy policy;
  policy.final_dtype = DType::kFloat32;
  const auto one = here(at::ones({4}, at::TensorOptions().dtype(at::kBFloat16)));
  auto handle = fully_shard(std::make_shared<Scale>(one), data_mesh(world), policy);
  const auto loss = handle.forward(one * 256).sum() + handle.forward(one).sum();
  backward(loss);
  handle.visit_full_gradients([&](const auto&, const at::Tensor& gradient) {
    EXPECT_TRUE(same_bits(gradient, here(at::full({4}, 257.0F))));
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_basic_test
