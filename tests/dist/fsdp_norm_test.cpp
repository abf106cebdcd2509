// Gradient norms of any p over any mesh against PyTorch's, in fp64.

#include <cmath>
#include <limits>

#include "dist/controls.h"
#include "support/test.h"
#include "tessera/clip.h"

namespace tessera::test::fsdp_norm_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Layout {
  int ranks;
  int replicas;
};

class Norms : public ::testing::TestWithParam<std::tuple<Layout, double>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Norms,
                         ::testing::Combine(::testing::Values(Layout{1, 1}, Layout{2, 1},
                                                              Layout{3, 1}, Layout{4, 1},
                                                              Layout{2, 2}, Layout{4, 2}),
                                            ::testing::Values(1.0, 2.0, 3.0, kInfinity, 2.5)));

double torch_norm(const Tensors& gradients, double p) {
  std::vector<at::Tensor> flat;
  for (const auto& [name, gradient] : gradients)
    flat.push_back(gradient.to(at::kDouble).reshape(-1));
  return at::linalg_vector_norm(at::cat(flat), p).item<double>();
}

// Naive: padding, replicas or shards counted several times; the norm of norms of another p.
TEST_P(Norms, AreTorchsOfTheWholeGradientOnEveryRank) {
  const auto [layout, p] = GetParam();
  ranks(layout.ranks).run([replicas = layout.replicas, order = p](World& world) {
    Twins twins(world, replicas);
    twins.run(0);
    const auto expected = torch_norm(whole_gradients(twins.handle()), order);
    const auto norm = gradient_norm(twins.handle(), order);
    EXPECT_NEAR(norm, expected, 1e-12 * expected);  // fp64 sums in another order
    auto sum = at::full({1}, norm, at::kDouble);
    comm::all_reduce(world.control(), sum, "norms");
    EXPECT_EQ(sum.item<double>(), norm * world.size());
  });
}

TEST_P(Norms, ClippingScalesEveryGradientToTheBound) {
  const auto [layout, p] = GetParam();
  ranks(layout.ranks).run([replicas = layout.replicas, order = p](World& world) {
    Twins twins(world, replicas);
    twins.run(0);
    const auto before = whole_gradients(twins.handle());
    const auto norm = gradient_norm(twins.handle(), order);
    EXPECT_EQ(clip_grad_norm(twins.handle(), 2 * norm, order), norm);
    expect_same(whole_gradients(twins.handle()), before, "below the bound");
    const auto bound = norm / 4;
    EXPECT_EQ(clip_grad_norm(twins.handle(), bound, order), norm);
    // torch's factor; products are formed in the gradient's dtype.
    for (const auto& [name, gradient] : whole_gradients(twins.handle())) {
      EXPECT_TRUE(same_bits(gradient, before.at(name).mul(bound / (norm + 1e-6)))) << name;
    }
    double local = 0;
    for (const auto& view : twins.handle().shards()) {
      const auto gradient = view.shard.grad().to(at::kDouble);
      if (gradient.numel() == 0) continue;
      local = std::max(local, at::linalg_vector_norm(gradient, order).item<double>());
    }
    EXPECT_LE(local, bound * (1 + 1e-6));
  });
}

/// A model of one parameter whose gradient is `gradient`.
void with_gradient(World& world, const at::Tensor& gradient,
                   const std::function<void(ShardedBase&)>& check) {
  auto handle = fully_shard(std::make_shared<Scale>(at::ones_like(gradient)), data_mesh(world));
  backward(handle.forward(gradient).sum());
  check(handle);
}

TEST_ON_RANKS(NormOrders, HighOnesNeitherOverflowNorVanish, 2) {
  const auto values = here(at::tensor({3e30, -4e30, 1e-30}, at::kFloat));
  with_gradient(world, values, [&](ShardedBase& handle) {
    EXPECT_NEAR(gradient_norm(handle, 100), 4e30 * std::pow(1 + std::pow(0.75, 100), 0.01), 1e24);
  });
  with_gradient(world, values * 1e-30F * 1e-5F, [&](ShardedBase& handle) {
    EXPECT_NEAR(gradient_norm(handle, 100) / 4e-5, std::pow(1 + std::pow(0.75, 100), 0.01), 1e-6);
  });
  with_gradient(world, here(at::zeros({3})),
                [&](ShardedBase& handle) { EXPECT_EQ(gradient_norm(handle, 3), 0.0); });
}

TEST_ON_RANKS(NormOrders, WhatIsNotFiniteShowsOnEveryRankInAnyPlace, 3) {
  for (const auto value : {std::nan(""), HUGE_VAL}) {
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      auto gradient = here(at::ones({300}));
      gradient[299] = value;  // the last rank's
      with_gradient(world, gradient, [&](ShardedBase& handle) {
        const auto shard = handle.shards()[0].shard;
        const auto before = shard.grad().clone();
        const auto norm = clip_grad_norm(handle, 1.0, p);
        EXPECT_EQ(std::isnan(norm), std::isnan(value)) << p;
        EXPECT_FALSE(std::isfinite(norm)) << p;
        EXPECT_TRUE(same_bits(shard.grad().nan_to_num(7), before.nan_to_num(7)));
      });
    }
  }
}

TEST_ON_RANKS(NormOrders, AnOrderThatIsNoneIsRefused, 2) {
  Twins twins(world);
  twins.run(0);
  for (const double p : {0.0, -1.0, -kInfinity, std::nan("")}) {
    EXPECT_THAT(thrown_by([&] { gradient_norm(twins.handle(), p); }),
                Says("expected a number above 0"));
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_norm_test
