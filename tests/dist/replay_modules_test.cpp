// Modules as users write them, with libtorch's own attention and with checkpoints inside, are
// replayed bit for bit, and recompute what they are set to.
#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <random>

#include "dist/replayed.h"
#include "tessera/recompute.h"

namespace tessera::test::replay_modules_test {
namespace {

using ::testing::SizeIs;

// -------------------------------------------------------------------------------------- attention

struct Attention {
  enum class Mask { kNone, kCausal, kAdded, kBools, kMasks };
  Mask mask = Mask::kNone;
  std::int64_t heads = 2, groups = 2, rows = 5;
  double dropout = 0.0;
  std::optional<double> scale = {};
  bool is_of_table = false;  ///< keys are no argument's
  bool prefers_math = false;

  at::Tensor operator()(Part& part, const at::Tensor& x) const {
    const auto width = Part::kWidth / heads;
    const auto split = [&](const at::Tensor& of, std::int64_t count) {
      return of.narrow(1, 0, count * width).view({1, of.size(0), count, width}).transpose(1, 2);
    };
    const at::Tensor y = at::linear(x, part.weight, part.bias);
    const at::Tensor keys = is_of_table ? x * part.table : x.sin();
    std::optional<at::Tensor> given;
    if (mask == Mask::kAdded) given = at::ones({rows, rows}, x.options()).triu(1) * -3.0;
    if (mask == Mask::kBools) given = at::ones({rows, rows}, at::kBool).tril();
    const auto mixed = at::scaled_dot_product_attention(
        split(y, heads), split(keys, groups), split(y.tanh(), groups), given, dropout,
        mask == Mask::kCausal, scale, /*enable_gqa=*/groups != heads);
    return x + mixed.transpose(1, 2).reshape({x.size(0), Part::kWidth});
  }
};
std::ostream& operator<<(std::ostream& out, const Attention& one) {
  return out << "mask " << static_cast<int>(one.mask) << ", " << one.heads << " heads, "
             << one.groups << " groups, " << one.rows << " rows, dropout " << one.dropout;
}

Attention drawn_attention(std::mt19937_64& draw) {
  Attention one;
  one.mask = static_cast<Attention::Mask>(draw() % static_cast<int>(Attention::Mask::kMasks));
  one.heads = draw() % 2 == 0 ? 2 : 4;
  one.groups = draw() % 2 == 0 ? one.heads : one.heads / 2;
  one.rows = 3 + static_cast<std::int64_t>(draw() % 6);
  if (draw() % 3 == 0) one.scale = 0.3;
  one.is_of_table = draw() % 2 == 0;
  one.prefers_math = draw() % 4 == 0;
  return one;
}

void expect_same_steps(Twins& twins, const Attention& attention, int steps) {
  for (int step = 0; step < steps; ++step) {
    SCOPED_TRACE(concat("step ", step));
    if (step % 3 == 2) {
      twins.both([&](Sharded<Model>& handle) {
        const at::NoGradGuard no_grad;
        return Several{handle.forward({rows(500, attention.rows)})[0].clone()};
      });
    }
    twins.step({{rows(1000 + static_cast<std::uint64_t>(step), attention.rows)}});
  }
}

// Naive: each of libtorch's may draw random numbers, with any arguments.
TEST(ReplayModules, AttentionThatDropsNothingIsReplayed) {
  for (std::uint64_t seed = 1; seed <= 16; ++seed) {
    std::mt19937_64 draw(seed);
    const auto attention = drawn_attention(draw);
    SCOPED_TRACE(concat("seed ", seed, ": ", attention));
    at::globalContext().setSDPUseFlash(!attention.prefers_math);
    ranks(1).run([&](World& world) {
      Twins twins(data_mesh(world), around([&](Part& part, const Several& in) {
                    return Several{attention(part, in[0])};
                  }));
      expect_same_steps(twins, attention, 9);
      EXPECT_THAT(reasons(twins.calls()), IsEmpty());
      EXPECT_GT(twins.calls().replayed, 4);
    });
    at::globalContext().setSDPUseFlash(true);
  }
}

TEST_ON_RANKS(ReplayModules, AttentionThatDropsIsRefused, 1) {
  const Attention attention{.dropout = 0.5};
  Twins twins(data_mesh(world), around([&](Part& part, const Several& in) {
                at::manual_seed(7);
                return Several{attention(part, in[0])};
              }));
  expect_same_steps(twins, attention, 6);
  EXPECT_THAT(reasons(twins.calls()), SizeIs(1));
  EXPECT_THAT(reasons(twins.calls()), Each(Says("random numbers")));
}

// The kernel is chosen where no operation shows it. Naive: replays keep that of the recording.
TEST(ReplayModules, OtherKernelsOfAttentionAreOtherVariants) {
  ranks(1).run([](World& world) {
    const Attention attention{.mask = Attention::Mask::kCausal};
    Twins twins(data_mesh(world), around([&](Part& part, const Several& in) {
                  return Several{attention(part, in[0])};
                }));
    for (const bool flash : {true, false, true}) {
      SCOPED_TRACE(flash);
      at::globalContext().setSDPUseFlash(flash);
      const auto before = twins.calls().replayed;
      expect_same_steps(twins, attention, 9);
      EXPECT_GT(twins.calls().replayed, before);
    }
    EXPECT_THAT(reasons(twins.calls()), IsEmpty());
  });
  at::globalContext().setSDPUseFlash(true);
}

TEST_ON_RANKS(ReplayModules, LayersThatAreNotInTrainingDrawNothing, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                const auto y = part.layer(in[0]);
                return Several{std::get<0>(at::native_dropout(y, 0.5, part.is_training()))};
              }));
  for (auto* handle : {&twins.eager, &twins.replayed}) handle->eval();
  for (int step = 0; step < 9; ++step) {
    twins.step({{rows(1000 + static_cast<std::uint64_t>(step))}});
  }
  EXPECT_THAT(reasons(twins.calls()), IsEmpty());
  EXPECT_GT(twins.calls().replayed, 4);
}

// ------------------------------------------------------------------------------------ checkpoints

/// A unit that may be set to recompute its forward.
class Block : public torch::nn::Module, public Recomputable {
 public:
  explicit Block(std::uint64_t seed)
      : weight(register_parameter("weight", seeded(seed, {Part::kWidth, Part::kWidth}) * 0.2)),
        bias(register_parameter("bias", seeded(seed + 1, {Part::kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const Several& in) {
      ++runs;
      return in[0] + at::tanh(at::linear(in[0], weight, bias));
    };
    return checkpoint(run, {x}, recompute());
  }
  at::Tensor weight, bias;
  int runs = 0;
};

class Blocks : public torch::nn::Module {
 public:
  explicit Blocks(const Mesh& mesh)
      : scale(register_parameter("scale", seeded(1, {Part::kWidth}) + 1.0)) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      blocks.push_back(std::make_shared<Block>(10 + 10 * i));
      handles.push_back(register_module(
          concat("block", i),
          std::make_shared<Sharded<Block>>(fully_shard(blocks.back(), mesh, PrecisionPolicy()))));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x * scale;
    for (const auto& handle : handles) y = handle->forward(y);
    return y;
  }
  at::Tensor scale;
  std::vector<std::shared_ptr<Block>> blocks;
  std::vector<std::shared_ptr<Sharded<Block>>> handles;
};

/// Blocks that run in one step of `handle`.
int runs_of_step(Sharded<Blocks>& handle, int step) {
  auto& blocks = handle.module()->blocks;
  for (const auto& block : blocks) block->runs = 0;
  handle.zero_grad();
  backward(squares(handle.forward(rows(1000 + static_cast<std::uint64_t>(step)))));
  int runs = 0;
  for (const auto& block : blocks) runs += block->runs;
  return runs;
}

// A sequence of modes, each for some steps. Naive: the recording of one mode is replayed in
// another, and a region that began with a checkpoint inside is never replayed.
TEST(ReplayModules, ModesOfRecomputationMayChangeBetweenSteps) {
  constexpr int kBlocks = 2;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    ranks(1).run([&](World& world) {
      std::mt19937_64 draw(seed);
      const auto sharded = [&] {
        return fully_shard(std::make_shared<Blocks>(data_mesh(world)), data_mesh(world));
      };
      auto eager = sharded(), replayed = sharded();
      compile(replayed, {.mode = CompileMode::kReplay});
      int step = 0, without = 0;
      for (int phase = 0; phase < 5; ++phase) {
        const auto mode =
            phase == 4 ? RecomputeMode::kNone : static_cast<RecomputeMode>(draw() % 3);
        const int steps = phase == 4 ? 6 : 1 + static_cast<int>(draw() % 6);
        for (auto* handle : {&eager, &replayed}) {
          for (const auto& block : handle->module()->blocks) block->set_recompute(mode);
        }
        for (int i = 0; i < steps; ++i, ++step) {
          SCOPED_TRACE(concat("step ", step, ", mode ", static_cast<int>(mode)));
          const int expected = runs_of_step(eager, step), found = runs_of_step(replayed, step);
          expect_same(whole_gradients(replayed), whole_gradients(eager), "gradients");
          EXPECT_EQ(expected, mode == RecomputeMode::kNone ? kBlocks : 2 * kBlocks);
          if (mode == RecomputeMode::kNone) ++without;
          const bool is_replayed = mode == RecomputeMode::kNone && without > 4;
          EXPECT_EQ(found, is_replayed ? 0 : expected);
        }
      }
      EXPECT_GT(replay_calls(replayed).replayed, 0);
    });
  }
}

}  // namespace
}  // namespace tessera::test::replay_modules_test
