// fully_shard on devices: the bits of ranks on the CPU, without a race, on whichever streams a rank
// computes.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <exception>

#include "comm/host_read.h"
#include "comm/stream.h"
#include "dist/trainable_changes.h"
#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "tessera/optim.h"
#include "tessera/trainable.h"

namespace tessera::sim::sharding_test {
namespace {

using comm::EventEnd;
using comm::EventSite;

struct Case {
  int ranks = 2;
  int replicas = 1;
  PrecisionPolicy policy = {};
  bool changes = false;  ///< units are kept gathered, and parameters freeze and unfreeze
};

/// The results of steps of two micro-batches each.
struct Trained {
  std::vector<at::Tensor> results;  ///< losses, gradients, parameters
  std::vector<double> norms;
};

Trained trained(World& world, const Case& c) {
  constexpr std::int64_t kWidth = 5;
  test::ShardedChain model(test::data_mesh(world, c.replicas), 1, 3, kWidth, c.policy);
  if (c.changes) model.handle.set_reshard_after_backward(false);
  SgdOptions options;
  options.lr = 0.001;
  const auto optimizer = make_sgd(model.handle, options);
  std::vector<at::Tensor> results;
  std::vector<double> norms;
  for (int step = 0; step < 3; ++step) {
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const at::Tensor x = test::input_of(world.rank(), 2 * step + micro_batch, kWidth);
      const at::Tensor loss = test::squares(model.handle.forward(x.to(world.device()).mul(1)));
      results.push_back(loss.detach());
      test::backward(loss);
    }
    norms.push_back(clip_grad_norm(model.handle, /*max_norm=*/0));
    for (const auto& [name, grad] : test::whole_gradients(model.handle)) results.push_back(grad);
    optimizer->step();
    model.handle.zero_grad();
    if (!c.changes || step == 2) continue;
    const auto change = step == 0 ? test::freeze({"block1.*"}) : test::unfreeze({"block1.*"});
    set_trainable(model.handle, {change}, {optimizer.get()});
  }
  for (const auto& [name, value] : test::whole_parameters(model.handle)) results.push_back(value);
  return {comm::read_on_host(results, "results"), norms};
}

std::vector<Trained> trained_by_ranks(const Case& c, Where where) {
  where.ranks = c.ranks;
  std::vector<Trained> of_ranks(static_cast<std::size_t>(c.ranks));
  on_ranks(where, [&](World& world) {
    of_ranks[static_cast<std::size_t>(world.rank())] = trained(world, c);
  });
  return of_ranks;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    all.push_back({1, 1, policy});
    all.push_back({2, 1, policy});
    all.push_back({3, 1, policy});
    all.push_back({4, 2, policy});
    all.push_back({3, 1, policy, /*changes=*/true});
  }
  return all;
}

TEST(ShardingOnDevices, HasTheBitsOfTheCpuWithoutARace) {
  for (const Done done : {Done::kAtOnce, Done::kOnlyWhenWaited}) {
    set_done(done);
    for (const Case& c : cases()) {
      const auto expected = trained_by_ranks(c, {});
      for (const Where& where :
           {Where{.device = "sim"}, Where{.device = "sim:0"}, Where{.device = "sim", .side = true},
            Where{.device = "sim:0", .side = true}}) {
        const auto found = trained_by_ranks(c, where);
        for (std::size_t rank = 0; rank < found.size(); ++rank) {
          const std::string what =
              concat(c.ranks, " ranks on ", where.device, ", rank ", rank, ", result ");
          const auto& results = found[rank].results;
          ASSERT_EQ(results.size(), expected[rank].results.size());
          for (std::size_t i = 0; i < results.size(); ++i) {
            expect_same_bits(results[i], expected[rank].results[i], concat(what, i));
          }
          // Added in fp64 shard by shard, which begin elsewhere: memory of devices is aligned more.
          for (std::size_t i = 0; i < found[rank].norms.size(); ++i) {
            EXPECT_NEAR(found[rank].norms[i] / expected[rank].norms[i], 1.0, 1e-14) << what;
          }
        }
        settle();
      }
    }
  }
  set_done(Done::kAtOnce);
}

/// (x w - bias) with a buffer that is cast, and counts of an integer one.
struct Tower : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return (x * weight - bias) * count.sum(); }
  at::Tensor weight = register_parameter("weight", test::seeded(1, {5}));
  at::Tensor bias = register_buffer("bias", test::seeded(2, {5}));
  at::Tensor count = register_buffer("count", at::tensor({1, 2, 3}, at::kLong));
};

// Naive: a module on a device whose buffers stay on the CPU.
TEST(ShardingOnDevices, BuffersAreWhereTheParametersAre) {
  const auto results = [](const std::string& device) {
    std::vector<at::Tensor> read;
    on_ranks({2, device}, [&](World& world) {
      const auto tower = std::make_shared<Tower>();
      auto handle = fully_shard(tower, test::data_mesh(world), test::in_bfloat16());
      EXPECT_EQ(tower->count.device(), world.device());
      const at::Tensor x = test::input_of(0, 0, 5).to(world.device());
      const at::Tensor y = handle.forward(x);
      test::backward(test::squares(y));
      if (world.rank() != 0) {
        test::whole_gradients(handle);
        return;
      }
      read = comm::read_on_host({y.detach(), test::whole_gradients(handle).at("weight")}, "y");
    });
    return read;
  };
  const auto found = results("sim"), expected = results("cpu");
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_same_bits(found[i], expected[i], std::to_string(i));
  }
}

// Proof that the first test could fail: nothing but these events orders compute and groups.
TEST(ShardingOnDevices, EachEventThatIsLeftOutIsFound) {
  for (const EventSite site : {EventSite::kIssue, EventSite::kWorkEnd, EventSite::kPeers}) {
    for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
      const auto left_out = without(site, end);
      try {
        trained_by_ranks({2}, {.device = "sim:0", .side = true});
      } catch (const std::exception&) {  // the race, or that the other rank has left
      }
      settle();
      EXPECT_FALSE(take_races().empty())
          << to_string(site) << (end == EventEnd::kRecord ? ", record" : ", block");
    }
  }
}

}  // namespace
}  // namespace tessera::sim::sharding_test
