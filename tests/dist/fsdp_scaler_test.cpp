// A scaled loss: the gradients of the plain one, and steps that all ranks leave out together.

#include <cmath>
#include <limits>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/grad_scaler.h"

namespace tessera::test::fsdp_scaler_test {
namespace {

constexpr std::int64_t kWidth = 6;

struct Layout {
  int ranks, replicas;
};
constexpr Layout kLayouts[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}, {2, 2}, {4, 2}};

/// Runs `body` on every layout.
void on_layouts(const std::function<void(World&, const Mesh&)>& body) {
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(concat(layout.ranks, " ranks, ", layout.replicas, " replicas"));
    ranks(layout.ranks).run([&](World& world) { body(world, data_mesh(world, layout.replicas)); });
  }
}

PrecisionPolicy in_float16(std::optional<DType> wire = std::nullopt) {
  PrecisionPolicy policy;
  policy.param_dtype = DType::kFloat16;
  policy.reduce_dtype = wire;
  policy.loss_scaling = true;
  return policy;
}

GradScalerOptions from(double scale, std::int64_t growth_interval = 1000) {
  GradScalerOptions options;
  options.init_scale = scale;
  options.growth_interval = growth_interval;
  return options;
}

/// Multiples of a quarter: what is computed with them in float16 is far from its smallest numbers.
std::shared_ptr<Chain> quarters(std::uint64_t seed = 5) {
  auto chain = std::make_shared<Chain>(seed, 2, kWidth);
  const at::NoGradGuard no_grad;
  for (auto& parameter : chain->parameters()) parameter.mul_(4).round_().div_(4);
  return chain;
}

at::Tensor quarter_input(int rank, int step) {
  return input_of(rank, step, kWidth).mul(4).round().div(4);
}

struct Schedule {
  bool sync_every = true;
  bool replicas_every = true;
};
constexpr Schedule kSchedules[] = {{true, true}, {false, true}, {true, false}, {false, false}};

/// Three micro-batches of a step. The middle one does not use block 1 on odd ranks.
template <class Scaled>
void step_of(Sharded<Chain>& handle, const std::shared_ptr<Chain>& chain, World& world,
             const Schedule& schedule, int step, const Scaled& scaled) {
  for (int i = 0; i < 3; ++i) {
    const bool last = i == 2;
    handle.set_requires_gradient_sync(last || schedule.sync_every);
    handle.set_requires_replica_reduce(last || schedule.replicas_every);
    chain->skip = i == 1 && world.rank() % 2 == 1 ? 1 : -1;
    backward(scaled(squares(handle.forward(quarter_input(world.rank(), 3 * step + i)))));
  }
  chain->skip = -1;
}

/// Losses, norms and parameters of steps with AdamW and clipping, by schedule; block 0's b is
/// frozen. `scale` 0: without a scaler. The scale doubles after every step.
Tensors trained(World& world, const Mesh& mesh, const PrecisionPolicy& policy,
                const Schedule& schedule, double scale, bool zero = true) {
  auto chain = quarters();
  chain->blocks[0]->b.set_requires_grad(false);
  auto handle = fully_shard(chain, mesh, policy);
  const auto optimizer = make_adamw(handle, adamw(0.01));
  std::optional<GradScaler> scaler;
  if (scale != 0) scaler.emplace(handle, from(scale, 1));
  Tensors found;
  for (int step = 0; step < 3; ++step) {
    step_of(handle, chain, world, schedule, step,
            [&](const at::Tensor& loss) { return scaler ? scaler->scaled(loss) : loss; });
    for (const auto& [name, gradient] : whole_gradients(handle)) {
      found[concat("gradient ", step, " ", name)] = gradient;
    }
    const double norm = clip_grad_norm(handle, 0.5);
    found[concat("norm ", step)] = here(at::scalar_tensor(norm, at::kDouble));
    if (scaler) {
      EXPECT_TRUE(scaler->step(*optimizer, handle, norm));
    } else {
      optimizer->step();
    }
    if (zero) handle.zero_grad();
  }
  for (const auto& [name, value] : whole_parameters(handle)) found[name] = value;
  return found;
}

// Naive: the scale rounds, is left in a norm, in a moment, or in the partial sums of a schedule.
TEST(GradScaler, AFloat32RunHasTheBitsOfTheUnscaledOneInEverySchedule) {
  on_layouts([](World& world, const Mesh& mesh) {
    for (const auto& schedule : kSchedules) {
      expect_same(trained(world, mesh, {}, schedule, 0x1p12), trained(world, mesh, {}, schedule, 0),
                  concat("sync ", schedule.sync_every, schedule.replicas_every));
    }
  });
}

// Naive: micro-batches of a new scale are added to a sum of the old one.
TEST(GradScaler, ASumThatContinuesOverStepsIsBroughtToTheNewScale) {
  on_layouts([](World& world, const Mesh& mesh) {
    for (const double factor : {1.0, 2.0}) {
      ShardOptions options;
      options.divide_factor = factor;
      auto handle =
          fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), mesh, {}, options);
      GradScaler scaler(handle, from(4.0, 1));
      for (int step = 1; step <= 4; ++step) {
        EXPECT_EQ(scaler.scale(), std::ldexp(4.0, step - 1));
        backward(scaler.scaled(handle.forward(here(at::full({kWidth}, 3.0))).sum()));
        const auto expected = here(at::full({kWidth}, 3.0 * world.size() * step / factor));
        EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), expected)) << step;
        EXPECT_TRUE(scaler.update(handle, gradient_norm(handle)));
      }
    }
  });
}

// Naive: unscaling rounds, so that gradients depend on the scale.
TEST(GradScaler, Float16GradientsHaveTheSameBitsAtEveryScaleThatHoldsThem) {
  on_layouts([](World& world, const Mesh& mesh) {
    for (const auto wire : {std::optional<DType>(), std::optional(DType::kFloat16)}) {
      for (const auto& schedule : kSchedules) {
        const auto gradients = [&](double scale) {
          auto chain = quarters();
          auto handle = fully_shard(chain, mesh, in_float16(wire));
          GradScaler scaler(handle, from(scale));
          step_of(handle, chain, world, schedule, 0, [&](const at::Tensor& loss) {
            // The loss is a sum of squares: in sixteenths and divided, far below 65504.
            return scaler.scaled(loss / 64);
          });
          EXPECT_TRUE(scaler.update(handle, gradient_norm(handle)));
          return whole_gradients(handle);
        };
        const auto once = gradients(0x1p8);
        expect_same(gradients(0x1p9), once);
        expect_same(gradients(0x1p11), once);
        for (const auto& [name, value] : once) EXPECT_GT(value.abs().max().item<double>(), 0);
      }
    }
  });
}

// Naive: without a scale gradients of 1e-7 vanish or keep two or three bits.
TEST(GradScaler, SmallGradientsAreThoseOfFloat64) {
  constexpr double kSmall = 1e-7;
  on_layouts([&](World& world, const Mesh& mesh) {
    for (const auto wire : {std::optional<DType>(), std::optional(DType::kFloat16)}) {
      auto plain = quarters();
      for (auto& parameter : plain->parameters()) parameter.set_data(parameter.to(at::kDouble));
      Tensors expected;
      for (int rank = 0; rank < world.size(); ++rank) {
        const auto raw = raw_gradients(*plain, [&] {
          backward(plain->forward(quarter_input(rank, 0).to(at::kDouble)).pow(2).sum() * kSmall);
        });
        for (const auto& [name, value] : raw) {
          auto& sum = expected[name];
          sum = sum.defined() ? sum + value : value;
        }
      }
      auto handle = fully_shard(quarters(), mesh, in_float16(wire));
      const auto errors = [&](GradScaler& scaler) {
        handle.zero_grad();
        const auto y = handle.forward(quarter_input(world.rank(), 0));
        backward(scaler.scaled(squares(y) * kSmall));
        EXPECT_TRUE(scaler.update(handle, gradient_norm(handle)));
        std::vector<double> all;
        for (const auto& [name, value] : whole_gradients(handle)) {
          all.push_back(relative_error(value, expected.at(name) / world.size()));
        }
        return all;
      };
      {
        // Eight roundings on the way, each of at most 2^-11, and sums of both signs.
        GradScaler scaler(handle, from(0x1p18));
        EXPECT_THAT(errors(scaler), Each(::testing::Le(0x1p-6)));
      }
      GradScaler none(handle, from(1.0));
      EXPECT_THAT(errors(none), Contains(::testing::Ge(0.05)));
    }
  });
}

// Naive: the rank with the overflow leaves its step out, the others make theirs.
TEST(GradScaler, AnOverflowOnOneRankLeavesTheStepOutOnAll) {
  on_layouts([](World& world, const Mesh& mesh) {
    for (const auto wire : {std::optional<DType>(), std::optional(DType::kFloat16)}) {
      for (int bad = 0; bad < world.size(); ++bad) {
        auto handle =
            fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), mesh, in_float16(wire));
        const auto optimizer = make_adamw(handle, adamw(0.01, 0.0));
        GradScaler scaler(handle, from(0x1p12));
        const auto step = [&](double large) {
          handle.zero_grad();
          const double x = world.rank() == bad ? large : 1.0;
          backward(scaler.scaled(handle.forward(here(at::full({kWidth}, x))).sum().to(at::kFloat)));
          return scaler.step(*optimizer, handle, clip_grad_norm(handle, 1.0));
        };
        EXPECT_FALSE(step(64.0));  // 64 * 4096 is above 65504
        EXPECT_EQ(scaler.scale(), 0x1p11);
        EXPECT_EQ(scaler.state().skipped_steps, 1);
        EXPECT_TRUE(same_bits(whole_parameters(handle).at("weight"), here(at::ones({kWidth}))));
        for (const auto& state : optimizer->state()) EXPECT_EQ(state.steps, 0);
        EXPECT_FALSE(step(std::numeric_limits<double>::quiet_NaN()));
        EXPECT_TRUE(step(1.0));
        EXPECT_EQ(scaler.state(), (LossScaleState{0x1p10, 1, 2}));
        for (const auto& state : optimizer->state()) EXPECT_EQ(state.steps, 1);
        EXPECT_TRUE(whole_parameters(handle).at("weight").lt(1.0).all().item<bool>());
      }
    }
  });
}

// Each rank's gradient is finite in float16; what the wire carries must not lose that it is not.
TEST_ON_RANKS(GradScaler, ASumThatOverflowsOnTheWireIsSeen, 2) {
  auto policy = in_float16(DType::kFloat16);
  policy.param_dtype = DType::kFloat32;
  auto handle =
      fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world), policy);
  GradScaler scaler(handle, from(0x1p15));
  handle.set_requires_gradient_sync(false);
  backward(scaler.scaled(handle.forward(here(at::full({kWidth}, 1.5))).sum()));
  handle.set_requires_gradient_sync(true);
  backward(scaler.scaled(handle.forward(here(at::full({kWidth}, 1.5))).sum()));
  EXPECT_FALSE(scaler.update(handle, gradient_norm(handle)));
  handle.zero_grad();
  backward(scaler.scaled(handle.forward(here(at::full({kWidth}, 1.5))).sum()));
  EXPECT_TRUE(scaler.update(handle, gradient_norm(handle)));
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), here(at::full({kWidth}, 1.5F))));
}

// Naive: a model that has diverged leaves out steps for ever, at a scale of 0 in the end.
TEST(GradScaler, AScaleThatCannotFallIsAnErrorOnEveryRank) {
  for (const int count : {1, 2, 4}) {
    const auto errors = errors_of(count, [](World& world) {
      auto handle =
          fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world), {});
      auto options = from(16.0);
      options.min_scale = 4.0;
      GradScaler scaler(handle, options);
      const double x = world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1.0;
      for (int step = 0;; ++step) {
        handle.zero_grad();
        backward(scaler.scaled(handle.forward(here(at::full({kWidth}, x))).sum()));
        EXPECT_LE(step, 2);
        EXPECT_FALSE(scaler.update(handle, gradient_norm(handle)));
      }
    });
    EXPECT_THAT(errors, Each(Says("at the loss scale 4 after 2 skipped steps",
                                  "grad_scaler.min_scale", "weight")));
  }
}

TEST_ON_RANKS(GradScaler, ContinuesWhereAnotherOneWas, 2) {
  auto handle =
      fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world), {});
  GradScaler scaler(handle, from(16.0, 4));
  scaler.restore({256.0, 3, 7});
  backward(scaler.scaled(handle.forward(here(at::ones({kWidth}))).sum()));
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), here(at::ones({kWidth}))));
  EXPECT_TRUE(scaler.update(handle, gradient_norm(handle)));
  EXPECT_EQ(scaler.state(), (LossScaleState{512.0, 0, 7}));
  EXPECT_THAT(thrown_by([&] { scaler.restore({3.0, 0, 0}); }), Says("power of two"));
  EXPECT_THAT(thrown_by([&] { scaler.restore({0.5, 0, 0}); }), Says("min_scale"));
}

TEST_ON_RANKS(GradScaler, IsOnePerModelAndOfItsOutermostHandle, 2) {
  const auto mesh = data_mesh(world);
  auto chain = std::make_shared<Chain>(3, 2, kWidth);
  chain->shard_blocks(mesh);
  GradScaler early(*chain->handles[0], from(8.0));
  auto handle = fully_shard(chain, mesh);
  EXPECT_THAT(thrown_by([&] { early.update(*chain->handles[0], 1.0); }),
              Says("make the scaler after the outermost fully_shard"));
  std::optional<GradScaler> scaler;
  scaler.emplace(handle, from(8.0));
  EXPECT_THAT(thrown_by([&] { const GradScaler second(handle); }), Says("one per model"));
  scaler.reset();
  // Without it losses are plain again.
  EXPECT_EQ(handle.unit()->runtime().loss_scale(), 1.0);
  EXPECT_EQ(thrown_by([&] { const GradScaler second(handle); }), "");
}

// Naive: half of a step's micro-batches are divided by the other half's scale.
TEST_ON_RANKS(GradScaler, MovesBetweenStepsOnly, 2) {
  auto handle =
      fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world), {});
  std::optional<GradScaler> scaler;
  scaler.emplace(handle, from(8.0, 1));
  const auto forward = [&] {
    return scaler->scaled(handle.forward(here(at::ones({kWidth}))).sum());
  };
  {
    const auto loss = forward();
    EXPECT_THAT(thrown_by([&] { scaler->update(handle, 1.0); }), Says("run backward first"));
  }
  handle.set_requires_gradient_sync(false);
  backward(forward());
  EXPECT_THAT(thrown_by([&] { scaler->update(handle, 1.0); }),
              Says("set_requires_gradient_sync(true)"));
  EXPECT_THAT(thrown_by([&] { scaler->restore({64.0, 0, 0}); }), Says("wait to be reduced"));
  EXPECT_EQ(scaler->scale(), 8.0);
  handle.set_requires_gradient_sync(true);
  backward(forward());
  EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), here(at::full({kWidth}, 2.0F))));
  EXPECT_TRUE(scaler->update(handle, gradient_norm(handle)));
}

// Naive: the rest of a step is divided by a scale that nothing multiplies by any more.
TEST(GradScaler, OneThatEndsInTheMiddleOfAStepIsMissed) {
  const auto errors = errors_of(1, [](World& world) {
    auto handle =
        fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world), {});
    handle.set_requires_gradient_sync(false);
    {
      GradScaler scaler(handle, from(8.0));
      backward(scaler.scaled(handle.forward(here(at::ones({kWidth}))).sum()));
    }
    handle.set_requires_gradient_sync(true);
    backward(handle.forward(here(at::ones({kWidth}))).sum());
  });
  EXPECT_THAT(errors[0], Says("at the loss scale 8 of a GradScaler that ended"));
}

}  // namespace
}  // namespace tessera::test::fsdp_scaler_test
