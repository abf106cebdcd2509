// [Note: controls]: a rank that sets a control differently is refused by name; and what a failure
// leaves under way (kept units, gathers by hand, reductions of micro-batches) does not outlive it.

#include "comm/queue.h"
#include "dist/controls.h"
#include "support/test.h"

namespace tessera::test::fsdp_agreement_test {
namespace {

struct Control {
  std::string text;  ///< how errors name it
  std::function<void(Twins&)> set;
};

void PrintTo(const Control& control, std::ostream* out) { *out << control.text; }

const std::vector<Control>& controls() {
  static const std::vector<Control> all = {
      {"set_requires_gradient_sync(false)",
       [](Twins& t) { t.handle().set_requires_gradient_sync(false); }},
      {"set_requires_gradient_sync(false) of block1",
       [](Twins& t) { t.block(1).set_requires_gradient_sync(false); }},
      {"set_requires_replica_reduce(false)",
       [](Twins& t) { t.handle().set_requires_replica_reduce(false); }},
      {"set_is_last_backward(false)", [](Twins& t) { t.handle().set_is_last_backward(false); }},
      {"set_reshard_after_forward(false) of block0, block1, block2",
       [](Twins& t) { t.handle().set_reshard_after_forward(false); }},
      {"set_reshard_after_forward(true) of (root)",
       [](Twins& t) { t.handle().set_reshard_after_forward(true, false); }},
      {"set_reshard_after_backward(false)",
       [](Twins& t) { t.handle().set_reshard_after_backward(false); }},
      {"set_unshard_in_backward(false) of block2",
       [](Twins& t) { t.block(2).set_unshard_in_backward(false); }},
      {"set_forward_prefetch of block0 to {block2, block1}",
       [](Twins& t) { t.block(0).set_forward_prefetch({&t.block(2), &t.block(1)}); }},
      {"set_backward_prefetch of block2 to {block0}",
       [](Twins& t) { t.block(2).set_backward_prefetch({&t.block(0)}); }},
      {"set_gradient_divide_factor(3) of block1",
       [](Twins& t) { t.block(1).set_gradient_divide_factor(3); }}};
  return all;
}

class Differences : public ::testing::TestWithParam<Control> {};
INSTANTIATE_TEST_SUITE_P(Controls, Differences, ::testing::ValuesIn(controls()),
                         [](const auto& control) {
                           auto name = control.param.text.substr(0, control.param.text.find('('));
                           return concat(name.substr(0, name.find(' ')), control.index);
                         });

// Naive: one rank sums what the other keeps, or waits for what the other never sends.
TEST_P(Differences, AreNamedAtTheNextCollective) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  const auto error = thrown_by([&] {
    two.run([&](World& world) {
      Twins twins(world);
      twins.step(0);
      twins.handle().zero_grad();
      if (world.rank() == 1) GetParam().set(twins);
      twins.step(1);
    });
  });
  EXPECT_THAT(error, Says("rank 0", "rank 1", GetParam().text));
}

// One rank a replica: nothing is gathered, so the order's agreement has to find it.
TEST_P(Differences, OfReplicasAreNamedBeforeTheirGradientsAreSummed) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  const auto error = thrown_by([&] {
    two.run([&](World& world) {
      Twins twins(world, 2);
      twins.step(0);
      twins.handle().zero_grad();
      if (world.rank() == 1) GetParam().set(twins);
      twins.step(1);
    });
  });
  EXPECT_THAT(error, Says("runtime controls differ between ranks: rank 0 has set none, "
                          "rank 1 ",
                          GetParam().text, "at the same place"));
}

// Over Gloo the labels travel as tags: both ranks wait, and the watch names both.
TEST(DifferencesOverGloo, AreNamedLongBeforeTheTimeout) {
  WorldOptions impatient;
  impatient.timeout = std::chrono::seconds(20);
  impatient.blocked_after = std::chrono::milliseconds(200);
  comm::ThreadRanks two(2, ThreadBackend::kGloo, impatient);
  std::string error;
  const auto seconds = seconds_of([&] {
    error = thrown_by([&] {
      two.run([&](World& world) {
        Twins twins(world);
        twins.step(0);
        if (world.rank() == 1) twins.handle().set_reshard_after_backward(false);
        twins.step(1);
      });
    });
  });
  EXPECT_THAT(error, Says("rank 0 issues", "rank 1 issues", "set_reshard_after_backward(false)"));
  EXPECT_LT(seconds, 10);
}

TEST(DifferencesOfCalls, AUnitThatOneRankAloneReshardsIsNamed) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  const auto error = thrown_by([&] {
    two.run([&](World& world) {
      Twins twins(world);
      twins.step(0);
      twins.block(1).unshard();
      if (world.rank() == 1) twins.block(1).reshard();
      twins.step(1);
    });
  });
  EXPECT_THAT(error, Says("rank 0 issues", "units kept unsharded: block1", "rank 1 issues"));
}

TEST(DifferencesOfCalls, ControlsSetBeforeTheFirstForwardAreComparedToo) {
  comm::ThreadRanks two(2, ThreadBackend::kInProcess);
  const auto error = thrown_by([&] {
    two.run([&](World& world) {
      Twins twins(world);
      if (world.rank() == 1) twins.block(1).set_reshard_after_forward(false);
      twins.step(0);
    });
  });
  EXPECT_THAT(error, Says("rank 0", "rank 1", "block1"));
}

// ------------------------------------------------------------------------------------- recovery

class Recovery : public ::testing::TestWithParam<std::tuple<int, ThreadBackend>> {};
INSTANTIATE_TEST_SUITE_P(Grid, Recovery,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(ThreadBackend::kInProcess,
                                                              ThreadBackend::kGloo)));

TEST_P(Recovery, WhatControlsKeptUnderWayIsForgotten) {
  const auto [count, backend] = GetParam();
  RankBarrier meeting(count);
  ranks(count, backend).run([&meeting](World& world) {
    RankBarrier::Seat seat(meeting);
    Twins twins(world);
    twins.step(0);
    twins.handle().zero_grad();
    twins.handle().set_reshard_after_backward(false);
    twins.handle().set_is_last_backward(false);
    twins.run(1);  // its reductions are under way, its units stay gathered
    twins.block(2).unshard_async();
    seat.wait();
    const bool culprit = world.rank() == world.size() - 1;
    if (culprit) {
      twins.model.chain->blocks[1]->before = [] {
        throw std::runtime_error("the user's forward went wrong");
      };
    }
    const auto error = thrown_by([&] {
      twins.run(2);
      comm::barrier(world.control(), "end of the step");
    });
    EXPECT_FALSE(error.empty());
    twins.model.chain->blocks[1]->before = nullptr;
    seat.wait();
    if (world.size() > 1) world.recover();
    twins.handle().set_is_last_backward(true);
    for (int step = 3; step < 6; ++step) twins.step(step, "after recovery");
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_agreement_test
