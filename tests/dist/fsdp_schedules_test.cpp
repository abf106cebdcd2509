// Schedules that trainers build from the controls: micro-batches, with the collectives that they
// issue, and modules that keep something of their own between calls.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

#include <atomic>

#include "dist/controls.h"
#include "support/quotient.h"
#include "support/test.h"

namespace tessera::test::fsdp_schedules_test {
namespace {

class Schedules : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Schedules,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 1), std::pair(2, 2), std::pair(4, 2)));

/// The plain chain's gradients of the sum of these micro-batches' losses, each added by itself.
Tensors plain_sum(Twins& twins, World& world, int micro_batches) {
  Tensors sums;
  for (int i = 0; i < micro_batches; ++i) {
    for (int rank = 0; rank < world.size(); ++rank) {
      const auto raw = raw_gradients(twins.plain, [&] {
        backward(squares(twins.plain.forward(input_of(rank, i, Twins::kWidth))));
      });
      for (const auto& [name, gradient] : raw) {
        auto& sum = sums[name];
        sum = sum.defined() ? sum + gradient.to(at::kDouble) : gradient.to(at::kDouble);
      }
    }
  }
  for (auto& [name, sum] : sums) sum = over(sum, world.size());
  return sums;
}

/// Sums of one set of fp32 values in another order: `terms` additions, each off by half a unit in
/// the last place of a partial sum, which the largest gradient bounds here within a factor of 8.
void expect_close(const Tensors& found, const Tensors& expected, int terms) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto bound = 8 * terms * 6e-8 * value.abs().max().item<double>();
    const auto error = (found.at(name).to(at::kDouble) - value).abs().max().item<double>();
    EXPECT_LE(error, bound) << name;
  }
}

enum class Synced { kAll, kAllButRoot, kAllButOneBlock };

// FSDP2's test_gradient_accumulation: which units are reduced in which micro-batch, and how often
// what is gathered.
TEST_P_ON_RANKS(Schedules, AccumulationReducesWhatIsToBeSyncedAndNothingElse, GetParam().first) {
  const auto replicas = GetParam().second;
  constexpr int kMicroBatches = 3;
  const bool communicates = world.size() / replicas > 1;
  for (const auto synced : {Synced::kAll, Synced::kAllButRoot, Synced::kAllButOneBlock}) {
    for (const bool stays : {false, true}) {
      Twins twins(world, replicas);
      if (stays) {
        twins.handle().set_reshard_after_forward(false);
        twins.handle().set_reshard_after_backward(false);
      }
      for (int i = 0; i < kMicroBatches; ++i) {
        const bool last = i + 1 == kMicroBatches;
        if (synced == Synced::kAll) {
          twins.handle().set_requires_gradient_sync(last);
        } else if (synced == Synced::kAllButRoot) {
          twins.handle().set_requires_gradient_sync(last, /*recurse=*/false);
        } else {
          twins.block(1).set_requires_gradient_sync(last);
        }
        const auto counts = twins.run(i);
        const auto units = kBlocks + 1;
        const auto reduced = last ? units : synced == Synced::kAll ? 0 : units - 1;
        EXPECT_EQ(counts.reductions, communicates ? reduced : 0);
        // The first backward does not know yet that the last block's comes first.
        const auto gathered = stays ? (i == 0 ? units : 0) : (i == 0 ? 7 : 6);
        EXPECT_EQ(counts.gathers, communicates ? gathered : 0);
      }
      expect_close(whole_gradients(twins.handle()), plain_sum(twins, world, kMicroBatches),
                   kMicroBatches * world.size());
    }
  }
}

// As one stage of a pipeline runs them: two forwards ahead, gradients shown after the last.
TEST_P_ON_RANKS(Schedules, OneForwardOneBackwardIsTheSumOfItsMicroBatches, GetParam().first) {
  constexpr int kMicroBatches = 4;
  for (const bool syncs_every : {true, false}) {
    Twins twins(world, GetParam().second);
    twins.handle().set_reshard_after_backward(false);
    std::vector<at::Tensor> losses;
    const auto run_backward = [&](std::size_t i) {
      const bool last = i + 1 == kMicroBatches;
      twins.handle().set_is_last_backward(last);
      twins.handle().set_requires_gradient_sync(last || syncs_every);
      backward(losses[i]);
      losses[i] = at::Tensor();
    };
    for (int i = 0; i < kMicroBatches; ++i) {
      losses.push_back(squares(twins.forward(i)));
      if (i > 0) run_backward(static_cast<std::size_t>(i) - 1);
    }
    run_backward(kMicroBatches - 1);
    expect_close(whole_gradients(twins.handle()), plain_sum(twins, world, kMicroBatches),
                 kMicroBatches * world.size());
  }
}

// As preference losses do: two forwards of recomputed units, then one backward through both.
TEST_P_ON_RANKS(Schedules, TwoForwardsOfRecomputedUnitsAndOneBackward, GetParam().first) {
  for (const bool outside : {true, false}) {
    Twins twins(world, GetParam().second);
    twins.model.chain->recomputes_outside = outside;
    for (auto& block : twins.model.chain->blocks) block->recomputes = !outside;
    for (int step = 0; step < 2; ++step) {
      twins.handle().zero_grad();
      const auto first = twins.forward(0);
      const auto second = twins.forward(1);
      backward(squares(first) + squares(second));
      expect_close(whole_gradients(twins.handle()), plain_sum(twins, world, 2), 2 * world.size());
    }
  }
}

// Memory that would have stayed is resharded by hand; the backward gathers it again.
TEST_P_ON_RANKS(Schedules, UnitsThatStayMayBeReshardedByHandAfterForward, GetParam().first) {
  Twins twins(world, GetParam().second);
  twins.handle().set_reshard_after_forward(false);
  for (int step = 0; step < 2; ++step) {
    twins.handle().zero_grad();
    const auto loss = squares(twins.forward(step));
    for (std::size_t i = 0; i < kBlocks; ++i) twins.block(i).reshard();
    backward(loss);
    twins.expect_plain(step);
  }
}

TEST_ON_RANKS(SchedulesAlone, OneRankCommunicatesNothing, 1) {
  Twins twins(world);
  twins.handle().set_reshard_after_backward(false);
  twins.block(0).unshard();
  EXPECT_EQ(twins.step(0), (Counts{0, 0}));
  EXPECT_EQ(twins.step(1), (Counts{0, 0}));
}

// ------------------------------------------------------------------------------ modules of torch

/// Each its own unit; statistics of a batch norm are buffers that its forward writes.
struct Normed : torch::nn::Module {
  Normed() { to(device_here()); }
  std::shared_ptr<Affine> affine = register_module("affine", std::make_shared<Affine>(1, 5, 6));
  torch::nn::LayerNorm layer =
      register_module("layer", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  torch::nn::BatchNorm1d batch = register_module("batch", torch::nn::BatchNorm1d(6));
  at::Tensor forward(const at::Tensor& x) {
    return batch->forward(layer->forward(affine->forward(x)));
  }
};

TEST_P_ON_RANKS(Schedules, NormsWithBuffersTrainAsUnsharded, GetParam().first) {
  const auto replicas = GetParam().second;
  Normed plain;
  auto module = std::make_shared<Normed>();
  auto handle = fully_shard(module, data_mesh(world, replicas));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, 5))));
    expect_same(whole_gradients(handle),
                plain_gradients_over(plain, world, replicas, world.size(), [&](int rank) {
                  backward(squares(plain.forward(input_of(rank, step, 5))));
                }));
  }
  EXPECT_EQ(handle.named_buffers().size(), 3U);
  EXPECT_EQ(module->batch->num_batches_tracked.item<std::int64_t>(), 2);
}

}  // namespace
}  // namespace tessera::test::fsdp_schedules_test
