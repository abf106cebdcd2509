// The scale as a value: it moves as PyTorch's, and takes no options that cannot work.
#include "tessera/loss_scale.h"

#include <ATen/ATen.h>
#include <ATen/ops/_amp_update_scale.h>

#include <cmath>
#include <random>

#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::loss_scale_test {
namespace {

// Truth: torch's own kernel, which torch.amp.GradScaler calls.
TEST(LossScale, MovesAsThatOfPyTorch) {
  std::mt19937 random(7);  // NOLINT(cert-msc51-cpp): a seed, so that the test repeats
  for (int run = 0; run < 200; ++run) {
    GradScalerOptions options;
    options.init_scale = std::ldexp(1.0, static_cast<int>(random() % 100));
    options.growth_interval = 1 + static_cast<std::int64_t>(random() % 5);
    options.growth_factor = std::ldexp(1.0, static_cast<int>(random() % 4));
    options.backoff_factor = std::ldexp(1.0, -1 - static_cast<int>(random() % 3));
    options.min_scale = 0x1p-120;
    LossScale ours(options);
    auto scale = here(at::full({}, static_cast<float>(options.init_scale)));
    auto tracker = here(at::zeros({}, at::kInt));
    const auto odds = 2 + random() % 12;
    std::int64_t skipped = 0;
    for (int step = 0; step < 60; ++step) {
      const bool inf = random() % odds == 0 && ours.can_shrink();
      skipped += inf ? 1 : 0;
      inf ? ours.step_was_skipped() : ours.step_was_finite();
      at::_amp_update_scale_(scale, tracker, here(at::full({}, inf ? 1.0F : 0.0F)),
                             options.growth_factor, options.backoff_factor,
                             options.growth_interval);
      ASSERT_EQ(ours.value(), scale.item<float>()) << "run " << run << " step " << step;
      ASSERT_EQ(ours.state().good_steps, tracker.item<int>());
    }
    EXPECT_EQ(ours.state().skipped_steps, skipped);
  }
}

struct Bad {
  std::function<void(GradScalerOptions&)> set;
  std::string message;
};

TEST(LossScale, CountsThatNoRunCanHaveAreRefused) {
  constexpr auto kMax = LossScaleState::kMaxSteps;
  LossScale scale({});
  for (const LossScaleState& state : {LossScaleState{8.0, -1, 0}, LossScaleState{8.0, 0, -1},
                                      LossScaleState{8.0, kMax, 0}, LossScaleState{8.0, 0, kMax}}) {
    EXPECT_THROW(scale.restore(state), Error) << state.good_steps << ", " << state.skipped_steps;
  }
  scale.restore({8.0, 0, kMax - 1});
  scale.step_was_skipped();
  EXPECT_EQ(scale.state().skipped_steps, kMax);
}

TEST(LossScale, OptionsThatCannotWorkAreRefusedByName) {
  const Bad all[] = {
      {[](auto& o) { o.init_scale = 1000; }, "grad_scaler.init_scale: found 1000"},
      {[](auto& o) { o.init_scale = 0x1p128; }, "grad_scaler.init_scale"},
      {[](auto& o) { o.growth_factor = 1.5; }, "grad_scaler.growth_factor: found 1.5"},
      {[](auto& o) { o.growth_factor = 0.5; }, "expected at least 1; 1 never grows"},
      {[](auto& o) { o.backoff_factor = 1; }, "grad_scaler.backoff_factor: found 1"},
      {[](auto& o) { o.backoff_factor = 0; }, "grad_scaler.backoff_factor: found 0"},
      {[](auto& o) { o.growth_interval = 0; }, "grad_scaler.growth_interval: found 0"},
      {[](auto& o) { o.min_scale = 0; }, "grad_scaler.min_scale: found 0"},
      {[](auto& o) { o.min_scale = 0x1p20; }, "expected at most init_scale, 65536"},
  };
  for (const auto& bad : all) {
    GradScalerOptions options;
    bad.set(options);
    EXPECT_THAT(thrown_by([&] { validate(options); }), Says(bad.message));
  }
  EXPECT_EQ(thrown_by([] { validate({}); }), "");
}

// Naive: a factor that jumps below the floor ends the run without having tried the floor.
TEST(LossScale, TheFloorIsTriedBeforeTheRunEnds) {
  GradScalerOptions options;
  options.init_scale = 0x1p40;
  options.backoff_factor = 0x1p-30;
  options.min_scale = 0x1p13;
  LossScale scale(options);
  ASSERT_TRUE(scale.can_shrink());
  scale.step_was_skipped();
  EXPECT_EQ(scale.value(), 0x1p13);
  EXPECT_FALSE(scale.can_shrink());
}

}  // namespace
}  // namespace tessera::test::loss_scale_test
