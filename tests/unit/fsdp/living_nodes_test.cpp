
#include <thread>

#include "fsdp/runtime/forwards.h"
#include "support/test.h"

namespace tessera::fsdp::living_nodes_test {
namespace {

// Device threads drop nodes while the rank's thread searches for one: it finds a node that lives
// all the time, and none that was dropped.
TEST(LivingNodes, ComeAndGoWhileAnotherThreadLooks) {
  constexpr int kThreads = 3;
  constexpr std::size_t kNodes = 64;
  constexpr int kRounds = 200;
  // Never looked into: addresses alone count.
  const std::vector<char> memory(kNodes * (kThreads + 1));
  const auto node = [&](std::size_t i) {
    return static_cast<const LivingNodes::Node*>(static_cast<const void*>(&memory[i]));
  };
  LivingNodes nodes;
  nodes.add(node(0));
  std::vector<std::thread> threads;
  for (std::size_t t = 1; t <= kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < kNodes; ++i) nodes.add(node(t * kNodes + i));
        for (std::size_t i = 0; i < kNodes; ++i) nodes.remove(node(t * kNodes + i));
      }
    });
  }
  for (int round = 0; round < kRounds; ++round) {
    EXPECT_TRUE(nodes.any([&](const auto* one) { return one == node(0); }));
    EXPECT_FALSE(nodes.any([&](const auto* one) { return one == node(1); }));
  }
  for (auto& thread : threads) thread.join();
  nodes.remove(node(0));
  EXPECT_FALSE(nodes.any([](const auto*) { return true; }));
}

}  // namespace
}  // namespace tessera::fsdp::living_nodes_test
