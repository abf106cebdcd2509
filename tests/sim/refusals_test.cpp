// Operations that CUDA refuses are refused here, too: they would pass on the CPU and fail on the
// first GPU.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::refusals_test {
namespace {

TEST(Refusals, DrawsFromTheDevicesGenerator) {
  const at::Tensor values = at::zeros({4}, on(0));
  EXPECT_THAT(refusal_of([&] { values.normal_(); }), Says("draws from the generator of sim:0"));
  EXPECT_THAT(refusal_of([] { at::randn({4}, on(0)); }), Says("drawn on the host"));
  EXPECT_THAT(refusal_of([] { at::randperm(4, on(0, at::kLong)); }), Says("randperm"));
  EXPECT_THAT(refusal_of([&] { at::dropout(values, 0.5, /*train=*/true); }), Says("bernoulli"));
  EXPECT_THAT(refusal_of([&] { at::multinomial(values + 1, 2); }), Says("multinomial"));
  // CUDA takes no generator of the CPU for its tensors either.
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  EXPECT_THAT(refusal_of([&] { values.normal_(0, 1, generator); }), Says("normal_"));
  const at::Tensor drawn = at::randn({4}, generator).to(device(0));
  EXPECT_EQ(drawn.isnan().any().item<bool>(), false);
}

TEST(Refusals, AllowedDrawsFollowFromTheStateAndMoveIt) {
  const AllowDraws allowed;
  at::Generator generator = at::globalContext().defaultGenerator(device(0));
  at::manual_seed(11);
  const at::Tensor state = generator.get_state();
  const at::Tensor first = at::randn({64}, on(0)), second = at::randn({64}, on(0));
  EXPECT_FALSE(at::equal(first, second));
  generator.set_state(state);
  EXPECT_TRUE(at::equal(at::randn({64}, on(0)), first));
  EXPECT_TRUE(at::equal(at::randn({64}, on(0)), second));
  const at::Tensor dropped = at::dropout(at::ones({1000}, on(0)), 0.25, /*train=*/true);
  EXPECT_NEAR(dropped.eq(0).sum().item<double>(), 250, 70) << "five standard deviations";
  EXPECT_TRUE(
      dropped.eq(0).logical_or(dropped.eq(at::scalar_tensor(1 / 0.75F))).all().item<bool>());
  EXPECT_EQ(state.device(), at::kCPU) << "keeping a state does not make the host wait";
}

TEST(Refusals, TensorsOfTheHostWithThoseOfTheDevice) {
  const at::Tensor here = at::ones({2, 2}, on(0)), host = at::ones({2, 2});
  const std::string expected = "found a tensor of the host [2, 2] with one on sim:0";
  EXPECT_THAT(refusal_of([&] { here + host; }), Says("devices, sim:0 and cpu"));
  EXPECT_THAT(refusal_of([&] { here.add_(host); }), Says("devices, sim:0 and cpu"));
  EXPECT_THAT(refusal_of([&] { here.masked_fill_(host > 0, 1); }),
              Says("found a tensor of the host [2, 2] with one on sim:0"));
  EXPECT_THAT(refusal_of([&] { at::mm(here, host); }), Says(expected));
  EXPECT_THAT(refusal_of([&] { at::cat({here, host}); }), Says(expected));
  EXPECT_THAT(refusal_of([&] { at::where(here > 0, here, host); }), Says(expected));
  EXPECT_THAT(refusal_of([&] { at::embedding(here, at::zeros({3}, at::kLong)); }),
              Says("found a tensor of the host [3]"));
  EXPECT_THAT(refusal_of([&] { here.index_select(0, at::zeros({1}, at::kLong)); }),
              Says("found a tensor of the host [1]"));
}

// A number on the host is an argument of the kernel, where CUDA has a place for one.
TEST(Refusals, NumbersOfTheHostAreTakenWhereCudaTakesThem) {
  const at::Tensor here = at::ones({3}, on(0)), two = at::scalar_tensor(2.0);
  EXPECT_EQ((here + two).sum().item<float>(), 9);
  EXPECT_EQ((here * 2).sum().item<float>(), 6);
  EXPECT_EQ(at::where(here > 0, here, two).sum().item<float>(), 3);
  EXPECT_EQ(here.clone().masked_fill_(here > 0, two).sum().item<float>(), 6);
  EXPECT_EQ(here.clone().fill_(two).sum().item<float>(), 6);
  EXPECT_EQ(at::floor_divide(here * 5, 2).sum().item<float>(), 6);
  EXPECT_EQ(at::floor_divide(here * 5, two).sum().item<float>(), 6);
  EXPECT_EQ(at::copysign(here, -2).sum().item<float>(), -3);
  EXPECT_EQ(here.index({at::tensor({0, 2}, at::kLong)}).sum().item<float>(), 2);
  EXPECT_EQ(take_counts().waits.count("blocking upload"), 1U) << "indices are uploaded";
  EXPECT_THAT(refusal_of([&] { at::cat({here, two.view({1})}); }), Says("of the host [1]"));
  EXPECT_THAT(refusal_of([&] { here.index_select(0, at::scalar_tensor(0, at::kLong)); }),
              Says("of the host []"));
}

TEST(Refusals, StepsOfFusedAdamWOnTheHost) {
  const auto step = [](const at::Tensor& steps) {
    std::vector<at::Tensor> parameter{at::ones({4}, on(0))}, grad{at::ones({4}, on(0))};
    std::vector<at::Tensor> first{at::zeros({4}, on(0))}, second{at::zeros({4}, on(0))}, of{steps};
    at::_fused_adamw_(parameter, grad, first, second, {}, of, 1e-3, 0.9, 0.95, 0.1, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  };
  EXPECT_THAT(refusal_of([&] { step(at::ones({})); }), Says("_fused_adamw_"));
  EXPECT_EQ(refusal_of([&] { step(at::ones({}, on(0))); }), "");
}

TEST(Refusals, WhatOverlapsItself) {
  const at::Tensor mask = at::ones({4}, on(0, at::kBool));
  EXPECT_THAT(refusal_of([&] { mask.narrow(0, 0, 3).masked_fill_(mask.narrow(0, 1, 3), false); }),
              Says("refer to a single memory location"));
}

// A view that was not registered would silently be a copy.
TEST(Refusals, ViewsShareMemoryOrAreNotThere) {
  const at::Tensor values = at::arange(24, on(0)).view({2, 3, 4});
  const at::Tensor views[] = {
      values.transpose(0, 2), values.narrow(1, 1, 2),      values.select(2, 3),
      values.unsqueeze(0),    values.expand({5, 2, 3, 4}), values.flatten(),
      values.unfold(2, 2, 1), values.view(at::kInt),       values.detach(),
      values.diagonal(),      values.permute({2, 0, 1}),   values.squeeze()};
  for (const at::Tensor& view : views) EXPECT_TRUE(view.is_alias_of(values));
}

}  // namespace
}  // namespace tessera::sim::refusals_test
