// Runs of a program on ranks that are threads, and the ways that messages can take.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "base/test_hooks.h"
#include "comm/p2p.h"
#include "dist/pipeline_stages.h"
#include "pipeline/kinds.h"
#include "pipeline/runner.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::test {

/// How messages travel.
struct Way {
  bool buffered = false;
  std::uint64_t delays = 0;  ///< seed; 0 = none
};

/// Messages travel this way while it lives.
class Travel {
 public:
  explicit Travel(const Way& way)
      : buffered_(test_hooks::buffered_messages, [buffered = way.buffered] { return buffered; }),
        delay_(test_hooks::message_delay, [seed = way.delays](const comm::P2PTag& tag) {
          if (seed == 0) return std::chrono::microseconds(0);
          const auto what = tag.stage * 131 + tag.micro_batch * 17 + tag.index;
          const bool forward = tag.direction == comm::P2PTag::Direction::kForward;
          tessera::testing::Dice dice(seed * 1000 +
                                      static_cast<std::uint64_t>(2 * what + (forward ? 1 : 0)));
          return std::chrono::microseconds(dice.chance(50) ? 0 : dice.roll(300));
        }) {}

 private:
  test_hooks::Set<decltype(test_hooks::buffered_messages)> buffered_;
  test_hooks::Set<decltype(test_hooks::message_delay)> delay_;
};

inline Mesh stages_mesh(World& world) {
  return world.mesh(MeshShape::dense(world.size(), 1, 1, 1, 1));
}

/// The stages of one rank.
struct Mine {
  Mine(const Toy& toy, const pipeline::Schedule& schedule, int rank)
      : ids(schedule.stages_of(rank)) {
    for (const int id : ids) stages.push_back(std::make_unique<ToyStage>(toy, id));
  }
  std::vector<pipeline::Stage*> pointers() const {
    std::vector<pipeline::Stage*> result;
    for (const auto& stage : stages) result.push_back(stage.get());
    return result;
  }
  /// Adds the results of a step on this rank.
  void add_to(Left& left, const std::vector<pipeline::Tensors>& results) const {
    for (const auto& result : results) left.losses.push_back(result.at(0));
    for (std::size_t i = 0; i < ids.size(); ++i) add_gradients(left, ids[i], *stages[i]);
  }
  std::vector<int> ids;
  std::vector<std::unique_ptr<ToyStage>> stages;
};

inline Left run(const pipeline::ValidProgram& program, const Toy& toy,
                ThreadBackend backend = ThreadBackend::kInProcess) {
  Left left;
  std::mutex mutex;
  ranks(program.schedule().ranks(), backend).run([&](World& world) {
    pipeline::Runner runner(pipeline::ties_of(stages_mesh(world)));
    const Mine mine(toy, program.schedule(), world.rank());
    const auto results = runner.run(program, mine.pointers(), {});
    const std::lock_guard lock(mutex);
    mine.add_to(left, results);
  });
  return left;
}

/// Whole numbers have a zero of either sign.
inline ::testing::AssertionResult same(const at::Tensor& a, const at::Tensor& b, Numbers numbers) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one of them is none";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (numbers == Numbers::kReal) return same_bits(a, b);
  if (a.cpu().equal(b.cpu())) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << " against " << b;
}

inline void expect_same_left(const Left& left, const Left& expected, Numbers numbers) {
  ASSERT_EQ(left.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < left.losses.size(); ++i) {
    EXPECT_TRUE(same(left.losses[i], expected.losses[i], numbers)) << "loss of micro-batch " << i;
  }
  ASSERT_EQ(left.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : left.gradients) {
    EXPECT_TRUE(same(gradient, expected.gradients.at(name), numbers)) << name;
  }
}

}  // namespace tessera::test
