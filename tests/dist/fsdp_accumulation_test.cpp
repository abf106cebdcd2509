// Schedules of accumulation: every step sums its own micro-batches, with anything deferred.

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"

namespace tessera::test::fsdp_accumulation_test {
namespace {

constexpr std::int64_t kWidth = 5;

enum class Sync { kEvery, kLast };
enum class Zero { kNone, kZeros };

/// A layout and what is deferred in it.
struct Schedule {
  int ranks, replicas;
  Sync sync, replica_sync;
  Zero zero;
};

std::string name_of(const ::testing::TestParamInfo<Schedule>& info) {
  const auto& s = info.param;
  return concat(s.ranks, "ranks", s.replicas, "replicas",
                s.sync == Sync::kEvery ? "Synced" : "NoSync",
                s.replica_sync == Sync::kEvery ? "" : "ReplicasDeferred",
                s.zero == Zero::kNone ? "ToNone" : "Zeros");
}

class Accumulate : public ::testing::TestWithParam<Schedule> {
 protected:
  /// One rank's weight gradient in micro-batch i of a step: small integers, so every sum is exact.
  static double value(int rank, int step, int i) { return 1 + rank + 10 * step + 3 * i; }

  void micro_batch(Sharded<Scale>& handle, World& world, int step, int i, bool last) {
    const auto& schedule = GetParam();
    handle.set_requires_gradient_sync(schedule.sync == Sync::kEvery || last);
    handle.set_requires_replica_reduce(schedule.replica_sync == Sync::kEvery || last);
    backward((handle.forward(here(at::ones({kWidth}))) * value(world.rank(), step, i)).sum());
  }

  static double sum(int ranks, int step, int micro_batches) {
    double total = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int i = 0; i < micro_batches; ++i) total += value(rank, step, i);
    }
    return total;
  }

  void run(const std::function<void(World&, Sharded<Scale>&)>& body, double factor = 1.0) {
    ranks(GetParam().ranks).run([&](World& world) {
      ShardOptions options;
      options.divide_factor = factor;
      auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))),
                                data_mesh(world, GetParam().replicas), {}, options);
      body(world, handle);
    });
  }

  static void expect(const Sharded<Scale>& handle, double gradient) {
    EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"),
                          here(at::full({kWidth}, static_cast<float>(gradient)))));
    const auto view = handle.shards()[0];
    ASSERT_TRUE(view.shard.grad().defined());
    EXPECT_TRUE(same_bits(view.shard.grad(),
                          here(at::full({view.end - view.begin}, static_cast<float>(gradient)))));
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, Accumulate,
                         ::testing::Values(Schedule{1, 1, Sync::kEvery, Sync::kEvery, Zero::kNone},
                                           Schedule{1, 1, Sync::kLast, Sync::kEvery, Zero::kZeros},
                                           Schedule{2, 1, Sync::kEvery, Sync::kEvery, Zero::kNone},
                                           Schedule{2, 1, Sync::kEvery, Sync::kEvery, Zero::kZeros},
                                           Schedule{2, 1, Sync::kLast, Sync::kEvery, Zero::kNone},
                                           Schedule{3, 1, Sync::kLast, Sync::kEvery, Zero::kZeros},
                                           Schedule{2, 2, Sync::kEvery, Sync::kLast, Zero::kNone},
                                           Schedule{2, 2, Sync::kEvery, Sync::kLast, Zero::kZeros},
                                           Schedule{2, 2, Sync::kLast, Sync::kEvery, Zero::kZeros},
                                           Schedule{4, 2, Sync::kEvery, Sync::kEvery, Zero::kNone},
                                           Schedule{4, 2, Sync::kEvery, Sync::kLast, Zero::kNone},
                                           Schedule{4, 2, Sync::kEvery, Sync::kLast, Zero::kZeros},
                                           Schedule{4, 2, Sync::kLast, Sync::kLast, Zero::kNone}),
                         name_of);

// Naive: a deferred partial is lost, counted twice, or mixed with the step before.
TEST_P(Accumulate, EveryStepSumsItsOwnMicroBatches) {
  for (const double factor : {1.0, 4.0}) {
    run(
        [&](World& world, Sharded<Scale>& handle) {
          for (int step = 0; step < 3; ++step) {
            handle.zero_grad(GetParam().zero == Zero::kNone);
            for (int i = 0; i < 3; ++i) micro_batch(handle, world, step, i, i == 2);
            expect(handle, sum(world.size(), step, 3) / factor);
          }
        },
        factor);
  }
}

TEST_P(Accumulate, WithoutZeroGradStepsAddUp) {
  run(
      [&](World& world, Sharded<Scale>& handle) {
        double total = 0;
        for (int step = 0; step < 3; ++step) {
          for (int i = 0; i < 2; ++i) micro_batch(handle, world, step, i, i == 1);
          total += sum(world.size(), step, 2);
          expect(handle, total / 2);
        }
      },
      2.0);
}

// A clip between steps that accumulate: what the user wrote is what is added to.
TEST_P(Accumulate, GradientsThatTheUserChangedAreAddedTo) {
  run(
      [&](World& world, Sharded<Scale>& handle) {
        for (int i = 0; i < 2; ++i) micro_batch(handle, world, 0, i, i == 1);
        {
          const at::NoGradGuard no_grad;
          for (const auto& view : handle.shards()) view.shard.grad().mul_(0.5);
        }
        expect(handle, sum(world.size(), 0, 2) / 4);
        for (int i = 0; i < 3; ++i) micro_batch(handle, world, 1, i, i == 2);
        expect(handle, sum(world.size(), 0, 2) / 4 + sum(world.size(), 1, 3) / 2);
        for (auto& view : handle.shards())
          view.shard.mutable_grad() = here(at::full({view.end - view.begin}, 8.0F));
        for (int i = 0; i < 2; ++i) micro_batch(handle, world, 2, i, i == 1);
        expect(handle, 8 + sum(world.size(), 2, 2) / 2);
      },
      2.0);
}

// A getter must not undo what the user did.
TEST_P(Accumulate, ReadingWholeGradientsChangesNothing) {
  run(
      [&](World& world, Sharded<Scale>& handle) {
        micro_batch(handle, world, 0, 0, true);
        const auto norm = clip_grad_norm(handle, 0.25);
        EXPECT_GT(norm, 0.25);
        const auto view = handle.shards()[0];
        const auto clipped = view.shard.grad().clone();
        const auto whole = whole_gradients(handle).at("weight");
        EXPECT_TRUE(same_bits(view.shard.grad(), clipped));
        EXPECT_NEAR(whole.norm().item<double>(), 0.25, 1e-6);
        handle.zero_grad();
        EXPECT_TRUE(at::equal(whole_gradients(handle).at("weight"), here(at::zeros({kWidth}))));
      },
      2.0);
}

/// Two parameters of one bucket.
struct Pair : torch::nn::Module {
  at::Tensor one = register_parameter("one", here(at::ones({3})));
  at::Tensor two = register_parameter("two", here(at::ones({3})));
  at::Tensor forward(const at::Tensor& x) { return (x * one).sum() + (x * two).sum(); }
};

// Naive: gradients of a bucket share a version counter; one edit makes the neighbours' sums be read
// back rounded.
TEST(Accumulation, AnEditOfOneGradientLeavesItsNeighboursSumUnrounded) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      PrecisionPolicy policy;
      policy.final_dtype = DType::kBFloat16;
      auto handle = fully_shard(std::make_shared<Pair>(), data_mesh(world), policy, undivided());
      const auto part = 1.0 / world.size();
      backward(handle.forward(here(at::full({3}, 256.0 * part))));
      for (const auto& view : handle.shards()) {
        if (view.contract->name == "one") view.shard.mutable_grad().fill_(0.0);
      }
      backward(
          handle.forward(here(at::full({3}, part))));  // 257: rounded to 256 in the final dtype
      backward(handle.forward(
          here(at::full({3}, part))));  // 258 is what a bf16 sum of 256, 1, 1 never reaches
      const auto found = whole_gradients(handle);
      EXPECT_TRUE(same_bits(found.at("one"), here(at::full({3}, 2.0, at::kBFloat16))));
      EXPECT_TRUE(same_bits(found.at("two"), here(at::full({3}, 258.0, at::kBFloat16))));
    });
  }
}

// Naive: a unit that only an unsynced micro-batch used keeps its gradient in the slot, for ever or
// for the next step.
class UnsyncedGradients : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};
INSTANTIATE_TEST_SUITE_P(Grid, UnsyncedGradients,
                         ::testing::Values(std::tuple(1, 1, false), std::tuple(2, 1, false),
                                           std::tuple(2, 2, false), std::tuple(2, 2, true),
                                           std::tuple(4, 2, true)));

TEST_P_ON_RANKS(UnsyncedGradients, AUnitThatTheLastMicroBatchDoesNotUseIsReducedAllTheSame,
                std::get<0>(GetParam())) {
  const auto replicas = std::get<1>(GetParam());
  auto chain = std::make_shared<Chain>(1, 2, kWidth);
  const auto options = undivided();
  chain->shard_blocks(data_mesh(world, replicas), {}, options);
  auto handle = fully_shard(chain, data_mesh(world, replicas), {}, options);
  Chain plain(1, 2, kWidth);
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    for (const bool last : {false, true}) {
      std::get<2>(GetParam()) ? handle.set_requires_replica_reduce(last)
                              : handle.set_requires_gradient_sync(last);
      chain->skip = last ? 1 : -1;
      backward(squares(handle.forward(input_of(0, step, kWidth))) *
               (world.rank() == 0 ? 1.0 : 0.0));
    }
    const auto raw =
        raw_gradients(plain, [&] { backward(squares(plain.forward(input_of(0, step, kWidth)))); });
    const auto found = whole_gradients(handle);
    for (const char* name : {"block1.a", "block1.b"})
      EXPECT_TRUE(same_bits(found.at(name), raw.at(name))) << step;
  }
}

// Naive: a norm of 0 and a step that does nothing, or both with what an earlier step has left.
TEST_P_ON_RANKS(UnsyncedGradients, NormsAndStepsWaitForTheLastMicroBatch, std::get<0>(GetParam())) {
  ShardedChain model(data_mesh(world, std::get<1>(GetParam())), 1, 2, kWidth);
  const auto optimizer = make_sgd(model.handle, sgd(0.5));
  const auto micro_batch = [&](int i, bool last) {
    std::get<2>(GetParam()) ? model.handle.set_requires_replica_reduce(last)
                            : model.handle.set_requires_gradient_sync(last);
    backward(squares(model.handle.forward(input_of(world.rank(), i, kWidth))));
  };
  for (int step = 0; step < 2; ++step) {
    model.handle.zero_grad();
    micro_batch(2 * step, false);
    const auto before = whole_parameters(model.handle);
    const auto told = Says("wait to be reduced", "set_requires_gradient_sync(true)");
    EXPECT_THAT(thrown_by([&] { gradient_norm(model.handle); }), told);
    EXPECT_THAT(thrown_by([&] { clip_grad_norm(model.handle, 1.0); }), told);
    EXPECT_THAT(thrown_by([&] { optimizer->step(); }), told);
    expect_same(whole_parameters(model.handle), before);
    micro_batch(2 * step + 1, true);
    EXPECT_GT(clip_grad_norm(model.handle, 1.0), 0);
    optimizer->step();
  }
}

// One unit without sync is enough.
TEST_ON_RANKS(UnsyncedUnit, IsNamed, 2) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  const auto optimizer = make_sgd(model.handle, sgd(0.5));
  model.chain->handles[1]->set_requires_gradient_sync(false);
  backward(squares(model.handle.forward(input_of(world.rank(), 0, kWidth))));
  EXPECT_THAT(thrown_by([&] { optimizer->step(); }), Says("block1"));
  EXPECT_THAT(thrown_by([&] { gradient_norm(model.handle); }), Says("block1"));
}

}  // namespace
}  // namespace tessera::test::fsdp_accumulation_test
