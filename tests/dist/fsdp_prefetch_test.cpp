// Prefetch lists: gathers go out when the lists say, on all ranks in one order, and no bit changes.

#include <mutex>

#include "base/test_hooks.h"
#include "comm/queue.h"
#include "dist/controls.h"
#include "support/test.h"

namespace tessera::test::fsdp_prefetch_test {
namespace {

std::string shown(const comm::Label& label) {
  const auto unit = label.unit == "(root)" ? std::string("root") : label.unit;
  if (unit != "root" && unit.rfind("block", 0) != 0) return "";  // a control message
  if (label.kind == comm::Kind::kAllGather) return "gather " + unit;
  if (label.kind == comm::Kind::kReduceScatter) return "reduce " + unit;
  return "";
}

/// Gathers of one step and, in between, which block computes: forward by the block itself, backward
/// by the hook on its input's gradient.
class Watched {
 public:
  explicit Watched(bool recomputes = false)
      : recomputes_(recomputes),
        two_(2, kBackend),
        watched_(test_hooks::before_issue, [this](int rank, const comm::Batch& batch) {
          const auto line = shown(batch.label);
          if (!line.empty() && line.rfind("reduce", 0) != 0) add(rank, line);
        }) {}

  /// The lines of step `number`, the same on both ranks.
  std::vector<std::string> lines(int number, const std::function<void(Twins&)>& set) {
    std::vector<std::map<int, std::vector<std::string>>> steps;
    two_.run([&](World& world) {
      Twins twins(world);
      twins.model.chain->recomputes_outside = recomputes_;
      set(twins);
      for (std::size_t i = 0; i < kBlocks; ++i) {
        twins.model.chain->blocks[i]->before = [&world, this, i] {
          world.queue().drain();
          add(world.rank(), concat("compute block", i));
        };
      }
      for (int step = 0; step <= number; ++step) {
        backward(squares(twins.forward(step)));
        world.queue().drain();
        comm::barrier(world.control(), "step");
        if (world.rank() == 0) steps.push_back(std::exchange(lines_, {}));
        comm::barrier(world.control(), "taken");
        twins.expect_plain(step);
        twins.handle().zero_grad();
        comm::barrier(world.control(), "compared");
        if (world.rank() == 0) lines_.clear();
        comm::barrier(world.control(), "cleared");
      }
    });
    EXPECT_EQ(steps.back().at(0), steps.back().at(1)) << "ranks issue in one order";
    return steps.back().at(0);
  }

 private:
  static constexpr auto kBackend = ThreadBackend::kInProcess;
  void add(int rank, const std::string& line) {
    const std::lock_guard lock(mutex_);
    lines_[rank].push_back(line);
  }
  bool recomputes_;
  std::mutex mutex_;
  std::map<int, std::vector<std::string>> lines_;
  comm::ThreadRanks two_;
  test_hooks::Set<decltype(test_hooks::before_issue)> watched_;
};

TEST(Prefetch, ForwardListsHoldFromTheFirstStepOn) {
  Watched watched;
  const auto lines = watched.lines(0, [](Twins& twins) {
    twins.handle().set_forward_prefetch({&twins.block(0), &twins.block(1)});
    twins.block(0).set_forward_prefetch({&twins.block(2)});
  });
  EXPECT_THAT(std::vector(lines.begin(), lines.begin() + 7),
              ElementsAre("gather root", "gather block0", "gather block1", "gather block2",
                          "compute block0", "compute block1", "compute block2"));
}

TEST(Prefetch, BackwardListsTakeTheAgreedOrdersPlace) {
  Watched watched;
  const auto lines = watched.lines(1, [](Twins& twins) {
    twins.block(2).set_backward_prefetch({&twins.block(0), &twins.block(1)});
  });
  // In the second step the last block is still there; its list goes out before it computes.
  EXPECT_THAT(lines, ElementsAre("gather root", "gather block0", "gather block1", "compute block0",
                                 "gather block2", "compute block1", "compute block2",
                                 "gather block0", "gather block1"));
}

TEST(Prefetch, AnEmptyListIsTheAgreedOrderAgain) {
  Watched watched;
  const auto agreed = watched.lines(1, [](Twins&) {});
  const auto lines = watched.lines(1, [](Twins& twins) {
    twins.handle().set_forward_prefetch({&twins.block(1)});
    twins.block(2).set_backward_prefetch({&twins.block(0)});
    twins.handle().set_forward_prefetch({});
    twins.block(2).set_backward_prefetch({});
  });
  EXPECT_EQ(lines, agreed);
}

TEST(Prefetch, ListsHoldAroundRecomputation) {
  Watched watched(/*recomputes=*/true);
  const auto lines = watched.lines(1, [](Twins& twins) {
    twins.handle().set_forward_prefetch({&twins.block(0), &twins.block(1)});
    twins.block(2).set_backward_prefetch({&twins.block(1), &twins.block(0)});
  });
  EXPECT_THAT(std::vector(lines.end() - 5, lines.end()),
              ElementsAre("gather block1", "gather block0", "compute block2", "compute block1",
                          "compute block0"));
}

// Units that ran before, run later again, or do not run at all.
TEST(Prefetch, AWrongGuessIsHarmless) {
  for (const int count : {1, 2, 3, 4}) {
    ranks(count).run([](World& world) {
      Twins twins(world);
      twins.block(1).set_forward_prefetch({&twins.block(0), &twins.block(1), &twins.handle()});
      twins.block(2).set_forward_prefetch({&twins.block(0)});
      twins.block(0).set_backward_prefetch({&twins.block(2), &twins.block(0)});
      twins.block(1).set_backward_prefetch({&twins.handle(), &twins.block(2)});
      const auto optimizer = make_sgd(twins.handle(), sgd(0.05));
      for (int step = 0; step < 3; ++step) {
        if (step == 2) twins.model.chain->skip = twins.plain.skip = 0;
        twins.step(step, "wrong guesses");
        optimizer->step();
      }
    });
  }
}

TEST(Prefetch, AUnitOfAnotherTreeIsRefused) {
  for (const bool forward : {true, false}) {
    const auto errors = errors_of(2, [forward](World& world) {
      Twins twins(world);
      auto other = fully_shard(std::make_shared<Block>(99, Twins::kWidth), data_mesh(world));
      forward ? twins.block(1).set_forward_prefetch({&other})
              : twins.block(1).set_backward_prefetch({&other});
      twins.run(0);
    });
    EXPECT_THAT(
        errors,
        Contains(Says("of unit block1: found unit (root), which another outermost module")));
  }
}

// Results appear at the wait and not before: a prefetched unit that is read too early is found.
TEST(Prefetch, NothingIsReadBeforeItsGatherHasBeenWaitedFor) {
  comm::ThreadRanks three(3, ThreadBackend::kInProcess);
  const test_hooks::Set late(test_hooks::deliver_at_wait, [] { return true; });
  three.run([](World& world) {
    Twins twins(world);
    twins.handle().set_forward_prefetch({&twins.block(2), &twins.block(1), &twins.block(0)});
    twins.block(2).set_backward_prefetch({&twins.block(0), &twins.block(1)});
    for (int step = 0; step < 3; ++step) {
      twins.block(1).unshard_async();
      twins.step(step);
    }
  });
}

}  // namespace
}  // namespace tessera::test::fsdp_prefetch_test
