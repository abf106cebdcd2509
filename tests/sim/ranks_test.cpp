// Ranks that are threads, each with its device: which one it is, and what its thread does there.
#include "sim/ranks.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <thread>

#include "comm/device.h"
#include "comm/group.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tessera/world.h"

namespace tessera::sim::ranks_test {
namespace {

/// "usage: ..."; empty where nothing is refused.
std::string refusal(int ranks, const std::string& device) {
  return tessera::refusal_of([&] { on_ranks({ranks, device}, [](World&) {}); });
}

TEST(RankDevices, EachRankHasTheDeviceOfItsNumber) {
  for (const int ranks : {1, 2, 4}) {
    on_ranks({ranks, "sim"}, [&](World& world) {
      EXPECT_EQ(world.device(), device(world.rank()));
      EXPECT_EQ(at::empty({1}, at::TensorOptions(device(0).type())).device(), world.device())
          << "it is the current one";
    });
  }
}

TEST(RankDevices, OneThatIsNamedIsEveryones) {
  on_ranks({2, "sim:1"}, [&](World& world) {
    EXPECT_EQ(world.device(), device(1));
    EXPECT_EQ(at::empty({1}, at::TensorOptions(device(0).type())).device(), device(1));
  });
}

// Slurm and containers show each rank its own device, as number 0.
TEST(RankDevices, TheOnlyVisibleOneIsEveryRanks) {
  EXPECT_EQ(comm::device_number(0, 1), 0);
  EXPECT_EQ(comm::device_number(7, 1), 0);
  EXPECT_EQ(comm::device_number(7, 8), 7);
  EXPECT_EQ(comm::device_number(2, 2), std::nullopt);
}

TEST(RankDevices, MoreRanksThanDevicesAreRefused) {
  EXPECT_EQ(refusal(9, "sim"),
            "usage: world: found local rank 8 and 8 sim devices, expected a device for each rank "
            "of a host; start 8 ranks on it, or name the one that all take, as sim:0");
  EXPECT_EQ(refusal(1, "sim:8"),
            "usage: world: found device sim:8, expected one of sim:0 to sim:7");
}

TEST(RankDevices, GlooCarriesThemToo) {
  on_ranks({.ranks = 2, .device = "sim", .backend = ThreadBackend::kGloo}, [](World& world) {
    EXPECT_EQ(world.backend(), "gloo");
    EXPECT_EQ(world.device(), device(world.rank()));
  });
}

/// Returns what a program prints, and its exit code.
std::pair<std::string, int> run_program(const std::string& command) {
  FILE* const program = ::popen((command + " 2>&1").c_str(), "r");
  std::string text;
  char buffer[4096];
  for (std::size_t got = 0; (got = std::fread(buffer, 1, sizeof buffer, program)) > 0;) {
    text.append(buffer, got);
  }
  const int status = ::pclose(program);
  return {text, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

// Naive: each waits for the other, in messages of other backends, until the timeout of 100 s.
TEST(RankDevices, OfTwoKindsAreRefusedOnceAndSoon) {
  for (const char* rank : {"0", "1"}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto [text, code] = run_program(concat(TESSERA_RANK_OF_ITS_KIND, " ", rank));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(code, 2) << text;
    EXPECT_THAT(text, Says(concat("rank ", rank, " on sim by gloo")));
    // In the order in which they came.
    EXPECT_THAT(text, Says(" on cpu by gloo", " by gloo, expected one kind of device"));
    EXPECT_EQ(text.find("world: found"), text.rfind("world: found")) << text;
    EXPECT_LT(seconds.count(), 50.0) << text;
  }
}

TEST(RankDevices, RanksOnTheCpuKeepAutogradAsItIs) {
  on_ranks({2, "cpu"}, [](World& world) {
    EXPECT_TRUE(world.device().is_cpu());
    EXPECT_TRUE(c10::AutogradState::get_tls_state().get_multithreading_enabled());
  });
}

TEST(RankDevices, AWorldOfOneHasOneToo) {
  std::thread([] {
    WorldOptions options;
    options.device = "sim:2";
    const auto world = World::of_one(options);
    EXPECT_EQ(world->device(), device(2));
    EXPECT_TRUE(comm::backward_stays_here());
  }).join();
}

TEST(RankDevices, AThreadOfTheUsersJoinsItsRank) {
  on_ranks({1, "sim:3"}, [](World& world) {
    std::thread([&] {
      EXPECT_FALSE(comm::backward_stays_here());
      world.attach_thread();
      EXPECT_TRUE(comm::backward_stays_here());
      EXPECT_EQ(at::empty({1}, at::TensorOptions(device(0).type())).device(), device(3));
    }).join();
  });
}

// Naive: autograd's one thread of the device runs rank 0's backward, which waits there for rank
// 1's, which waits for the thread.
TEST(RankDevices, BackwardsOfRanksThatShareOneWaitForEachOther) {
  on_ranks({2, "sim:0"}, [](World& world) {
    const auto rank_thread = std::this_thread::get_id();
    at::Tensor leaf = at::ones({4}, at::TensorOptions(world.device())).requires_grad_(true);
    const at::Tensor middle = leaf * 2;
    int hooks = 0;
    middle.register_hook([&](const at::Tensor& grad) {
      comm::barrier(world.control(), "in the middle of backward");
      EXPECT_EQ(std::this_thread::get_id(), rank_thread);
      ++hooks;
      return grad;
    });
    torch::autograd::backward({(middle * 3).sum()}, {});
    EXPECT_EQ(hooks, 1);
    expect_same_bits(leaf.grad(), at::full({4}, 6.0F), "rank " + std::to_string(world.rank()));
  });
}

}  // namespace
}  // namespace tessera::sim::ranks_test
