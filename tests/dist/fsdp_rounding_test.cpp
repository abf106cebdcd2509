// Where gradients are rounded, and where not: at arrival (if asked), on the wire, in the final
// cast.

#include <atomic>

#include "base/test_hooks.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_rounding_test {
namespace {

constexpr std::int64_t kWidth = 5;

Tensors scaled(World& world, const PrecisionPolicy& policy,
               const std::vector<double>& micro_batches, int replicas = 1) {
  auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))),
                            data_mesh(world, replicas), policy, undivided());
  for (std::size_t i = 0; i < micro_batches.size(); ++i) {
    handle.set_requires_gradient_sync(i + 1 == micro_batches.size());
    // Only rank 0 brings a gradient, so that the sum over ranks adds nothing to the question.
    backward(
        (handle.forward(here(at::ones({kWidth}))) * (world.rank() == 0 ? micro_batches[i] : 0.0))
            .sum());
  }
  return whole_gradients(handle);
}

constexpr double kFine = 1.0 + 1.0 / 1024;  // exact in fp32, 1 in bf16

TEST_ON_RANKS(Rounding, TheWireRoundsToReduceAndNothingElseDoes, 2) {
  PrecisionPolicy policy;
  const auto exact = here(at::full({kWidth}, static_cast<float>(kFine)));
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine}).at("weight"), exact));
  policy.reduce_dtype = DType::kBFloat16;
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine}).at("weight"), here(at::ones({kWidth}))));
  // The slot before the wire is fp32: 2^-10 four times is 2^-8, which bf16 rounds to even only at
  // the wire.
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine, 3.0 / 1024, 4.0 / 1024}).at("weight"),
                        here(at::full({kWidth}, 1.0F + 1.0F / 128))));
}

TEST_ON_RANKS(Rounding, ReplicasRoundToReduceToo, 2) {
  PrecisionPolicy policy;
  policy.reduce_dtype = DType::kBFloat16;
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine}, 2).at("weight"), here(at::ones({kWidth}))));
}

/// Bytes that each rank hands to the replica sum, in all.
std::vector<std::int64_t> replica_bytes(int count, const std::function<void(World&)>& body) {
  comm::ThreadRanks ranks(count, ThreadBackend::kInProcess);
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(count), 0);
  const test_hooks::Set counted(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    if (batch.label.unit == "replicas") bytes[static_cast<std::size_t>(rank)] += batch.bytes();
  });
  ranks.run(body);
  return bytes;
}

// Naive: the partial is rounded to `reduce` and sent in `accumulate`, twice the bytes.
TEST(Rounding, ReplicasSendInReduce) {
  for (const auto& [count, replicas] : {std::pair(2, 2), std::pair(4, 2), std::pair(3, 3)}) {
    for (const auto reduce : {DType::kFloat32, DType::kBFloat16}) {
      std::atomic<std::int64_t> slice = 0;
      const auto bytes = replica_bytes(count, [&](World& world) {
        PrecisionPolicy policy;
        policy.reduce_dtype = reduce;
        auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))),
                                  data_mesh(world, replicas), policy);
        backward(handle.forward(here(at::ones({kWidth}))).sum());
        slice = handle.unit()->buckets()[0]->plan().slice_numel();
      });
      EXPECT_GE(slice, 64);
      EXPECT_THAT(bytes, Each(slice * size_of(reduce)));
    }
  }
}

// Naive: a sum in the dtype of the wire: 256 + 1 is 256 in bf16.
TEST(Rounding, ReplicasAreAddedInAccumulateForAnyWire) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    for (const auto& [count, replicas] : {std::pair(2, 2), std::pair(3, 3), std::pair(4, 2)}) {
      ranks(count, backend).run([&](World& world) {
        PrecisionPolicy policy;
        policy.reduce_dtype = DType::kBFloat16;
        // Large enough that three replicas sum in two phases.
        constexpr std::int64_t kMany = 100003;
        auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kMany}))),
                                  data_mesh(world, replicas), policy, undivided());
        const bool last = world.rank() + 1 == world.size();
        const auto value = world.rank() == 0 ? 256.0 : last ? 1.0 : 0.0;
        backward((handle.forward(here(at::ones({kMany}))) * value).sum());
        EXPECT_TRUE(
            same_bits(whole_gradients(handle).at("weight"), here(at::full({kMany}, 257.0F))));
      });
    }
  }
}

// Naive: a partial that is kept in the dtype of the wire between micro-batches.
TEST(Rounding, ADeferredPartialOverReplicasIsKeptInAccumulate) {
  for (const auto& [count, replicas] : {std::pair(2, 2), std::pair(4, 2)}) {
    ranks(count).run([replicas](World& world) {
      PrecisionPolicy policy;
      policy.reduce_dtype = DType::kBFloat16;
      auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))),
                                data_mesh(world, replicas), policy, undivided());
      for (const double value : {256.0, 1.0, 1.0}) {
        handle.set_requires_replica_reduce(value == 1.0);
        backward(
            (handle.forward(here(at::ones({kWidth}))) * (world.rank() == 0 ? value : 0.0)).sum());
      }
      EXPECT_TRUE(
          same_bits(whole_gradients(handle).at("weight"), here(at::full({kWidth}, 258.0F))));
    });
  }
}

// Naive: a temporary a step for the quotient, the cast or the addend of the replicas.
void expect_memory_of_final_gradients(bool input_gradient) {
  for (const auto& [count, replicas] : {std::pair(1, 1), std::pair(2, 1), std::pair(2, 2)}) {
    ranks(count).run([replicas, input_gradient](World& world) {
      for (const auto final : {DType::kFloat32, DType::kBFloat16}) {
        PrecisionPolicy policy;
        policy.reduce_dtype = DType::kBFloat16;
        policy.final_dtype = final;
        ShardOptions options;
        options.divide_factor = 3.0;
        auto handle = fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))),
                                  data_mesh(world, replicas), policy, options);
        if (input_gradient) handle.unit()->runtime().free_gradients();
        const void* place = nullptr;
        std::int64_t blocks = 0;
        const auto& bucket = *handle.unit()->buckets().front();
        const bool kept = world.device().is_cpu() && !input_gradient;
        for (int step = 0; step < 4; ++step) {
          handle.zero_grad();
          EXPECT_EQ(bucket.final_memory().defined(), step > 0 && kept);
          EXPECT_EQ(bucket.accumulator().defined(), step > 0 && kept);
          backward(handle.forward(here(at::ones({kWidth}))).sum());
          const auto& gradient = handle.shards()[0].shard.grad();
          if (step == 1) {
            place = gradient.const_data_ptr();
            blocks = handle.unit()->runtime().pool()->blocks_made();
          } else if (step > 1) {
            EXPECT_TRUE(!kept || gradient.const_data_ptr() == place);
            EXPECT_EQ(handle.unit()->runtime().pool()->blocks_made(), blocks);
          }
        }
      }
    });
  }
}

TEST(Rounding, ASteadyStepTakesNoNewMemoryForFinalGradients) {
  expect_memory_of_final_gradients(false);
}

TEST(Rounding, TheHostGivesTheMemoryOfClearedGradientsBackWhereItIsToldTo) {
  expect_memory_of_final_gradients(true);
}

TEST_ON_RANKS(Rounding, OneRankHasNoWire, 1) {
  PrecisionPolicy policy;
  policy.reduce_dtype = DType::kBFloat16;
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine}).at("weight"),
                        here(at::full({kWidth}, static_cast<float>(kFine)))));
}

TEST(Rounding, FinalIsOneCastAtTheEndOfTheStep) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      PrecisionPolicy policy;
      policy.final_dtype = DType::kBFloat16;
      EXPECT_TRUE(same_bits(scaled(world, policy, {256, 1, 1}).at("weight"),
                            here(at::full({kWidth}, 258, at::kBFloat16))));
    });
  }
}

TEST_ON_RANKS(Rounding, ArrivalRoundsOnlyWhereARuleAsks, 2) {
  PrecisionPolicy policy;
  PrecisionRule rule;
  rule.match = {"weight"};
  rule.grad_dtype = DType::kBFloat16;
  policy.rules = {rule};
  EXPECT_TRUE(same_bits(scaled(world, policy, {kFine, 1.0 / 1024}).at("weight"),
                        here(at::full({kWidth}, static_cast<float>(kFine)))));
}

TEST_ON_RANKS(Rounding, AccumulationInDoubleKeepsWhatFloatLoses, 2) {
  PrecisionPolicy policy;
  policy.accumulate_dtype = policy.reduce_dtype = policy.final_dtype = DType::kFloat64;
  const double tiny = std::ldexp(1.0, -40);
  EXPECT_TRUE(same_bits(scaled(world, policy, {1, tiny}).at("weight"),
                        here(at::full({kWidth}, 1 + tiny, at::kDouble))));
}

TEST_ON_RANKS(Rounding, TheDefaultDividesByTheDataRanksOnce, 4) {
  for (const int replicas : {1, 2, 4}) {
    auto handle =
        fully_shard(std::make_shared<Scale>(here(at::ones({kWidth}))), data_mesh(world, replicas));
    backward((handle.forward(here(at::ones({kWidth}))) * static_cast<double>(world.rank())).sum());
    EXPECT_TRUE(same_bits(whole_gradients(handle).at("weight"), here(at::full({kWidth}, 1.5F))))
        << replicas;
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_rounding_test
