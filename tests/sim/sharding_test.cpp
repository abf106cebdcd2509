// fully_shard on devices: the bits of ranks on the CPU, without a race, whatever streams a rank
// computes on.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "base/test_hooks.h"
#include "comm/host_read.h"
#include "comm/stream.h"
#include "dist/plain.h"
#include "sim/streams.h"
#include "tessera/clip.h"
#include "tessera/optim.h"

namespace tessera::sim::sharding_test {
namespace {

using comm::EventEnd;
using comm::EventSite;
using comm::Stream;
using comm::StreamScope;

struct Case {
  int ranks = 2;
  int replicas = 1;
  PrecisionPolicy policy = {};
};

struct Where {
  std::string device = "cpu";
  bool side = false;  ///< not on the device's default stream
};

/// Of steps of two micro-batches each.
struct Trained {
  std::vector<at::Tensor> results;  ///< losses, gradients, parameters
  std::vector<double> norms;
};

Trained trained(World& world, const Case& c) {
  constexpr std::int64_t kWidth = 5;
  test::ShardedChain model(test::data_mesh(world, c.replicas), 1, 3, kWidth, c.policy);
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
  }
  for (const auto& [name, value] : test::whole_parameters(model.handle)) results.push_back(value);
  return {comm::read_on_host(results, "results"), norms};
}

std::vector<Trained> trained_by_ranks(const Case& c, const Where& where) {
  std::vector<Trained> of_ranks(static_cast<std::size_t>(c.ranks));
  WorldOptions options;
  options.device = where.device;
  options.timeout = std::chrono::seconds(20);
  launch_threads(
      c.ranks, ThreadBackend::kInProcess,
      [&](World& world) {
        const RankScope rank(world.rank());
        const StreamScope here(where.side ? Stream::make(world.device()) : Stream());
        of_ranks[static_cast<std::size_t>(world.rank())] = trained(world, c);
      },
      options);
  return of_ranks;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const PrecisionPolicy& policy : {PrecisionPolicy(), test::in_bfloat16()}) {
    all.push_back({1, 1, policy});
    all.push_back({2, 1, policy});
    all.push_back({3, 1, policy});
    all.push_back({4, 2, policy});
  }
  return all;
}

TEST(ShardingOnDevices, HasTheBitsOfTheCpuWithoutARace) {
  for (const Done done : {Done::kAtOnce, Done::kOnlyWhenWaited}) {
    set_done(done);
    for (const Case& c : cases()) {
      const auto expected = trained_by_ranks(c, {});
      for (const Where& where :
           {Where{"sim"}, Where{"sim:0"}, Where{"sim", true}, Where{"sim:0", true}}) {
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

// Proof that the test above could fail: nothing but these events orders compute and groups.
TEST(ShardingOnDevices, EachEventThatIsLeftOutIsFound) {
  for (const EventSite site : {EventSite::kIssue, EventSite::kWorkEnd, EventSite::kPeers}) {
    for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
      const test_hooks::Set without(
          test_hooks::leaves_out_event,
          [&](EventSite which, EventEnd half) { return which == site && half == end; });
      try {
        trained_by_ranks({2}, {"sim:0", true});
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
