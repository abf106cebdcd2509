// Exchanges of activations meet their own on other ranks alone: the same stage, micro-batch and
// pass, for rows of any size.

#include <random>

#include "base/doing.h"
#include "base/test_hooks.h"
#include "comm/batch.h"
#include "grad/keep.h"
#include "parallel/transitions.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/step_scope.h"

namespace tessera::test::exchange_labels_test {
namespace {

using ::testing::ContainsRegex;

constexpr std::int64_t kWidth = 4;

parallel::Axis experts_of(World& world) {
  return parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, world.size(), 1)), axis::kExpert);
}

/// Whose exchange one is, as its label says it.
struct Whose {
  int stage = 0;
  std::uint32_t micro_batch = 0;
  comm::ActivationPass pass = comm::ActivationPass::kForward;
  bool operator==(const Whose&) const = default;
  std::string text() const {
    return concat("all_to_all of experts dispatch \\(#[0-9]+, unit 0, micro-batch ", micro_batch,
                  ", stage ", stage, ", ", comm::to_string(pass), ": Float\\)");
  }
};

/// The error of both ranks.
std::string named(const Whose& zero, const Whose& one) {
  return concat("rank 0 issues ", zero.text(), " but rank 1 issues ", one.text());
}

/// One exchange of two rows with the other rank.
void exchange(const Whose& whose, const parallel::Axis& axis) {
  UnitHere::enter(whose.stage, whose.micro_batch);
  grad::KeptResults results;
  std::optional<grad::KeepScope> again;
  if (whose.pass == comm::ActivationPass::kRecomputed) {
    again.emplace(results, grad::CheckpointRun::kAgain);
  }
  parallel::exchange_rows(here(at::ones({2, kWidth})), axis, {{1, 1}, {1, 1}}, "experts dispatch",
                          whose.pass == comm::ActivationPass::kBackward
                              ? parallel::Direction::kBackward
                              : parallel::Direction::kForward);
  UnitHere::leave_step();
}

// Naive: labels with the layer's name alone, by which rows of one micro-batch arrive as another's.
TEST(ExchangeLabels, ThoseOfOtherStagesMicroBatchesAndPassesNeverMeet) {
  using Pass = comm::ActivationPass;
  constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward, Pass::kRecomputed};
  std::mt19937 random(45);
  const auto drawn = [&] {
    return Whose{static_cast<int>(random() % 2), static_cast<std::uint32_t>(random() % 2),
                 kPasses[random() % 3]};
  };
  int met = 0;
  for (int i = 0; i < 60; ++i) {
    const Whose of_ranks[] = {drawn(), drawn()};
    const auto errors =
        errors_of(2, [&](World& world) { exchange(of_ranks[world.rank()], experts_of(world)); });
    met += of_ranks[0] == of_ranks[1] ? 1 : 0;
    for (const std::string& error : errors) {
      if (of_ranks[0] == of_ranks[1]) {
        EXPECT_EQ(error, "");
      } else {
        EXPECT_THAT(error, ContainsRegex(named(of_ranks[0], of_ranks[1])));
      }
    }
  }
  EXPECT_GT(met, 0);
}

/// Sends its rows to the next rank, and may be computed again.
struct Exchanging : torch::nn::Module {
  Exchanging(parallel::Axis over, RecomputeMode how)
      : weight(register_parameter("weight", seeded(1, {kWidth, kWidth}))),
        axis(std::move(over)),
        mode(how) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) {
      return parallel::all_to_all(at::tanh(at::mm(in[0], weight)), axis, {{1, 1}, {1, 1}},
                                  "experts dispatch");
    };
    return mode == RecomputeMode::kNone ? run({x}) : checkpoint(run, {x}, mode);
  }
  at::Tensor weight;
  parallel::Axis axis;
  RecomputeMode mode;
};

Sharded<Exchanging> sharded(World& world, RecomputeMode mode) {
  return fully_shard(std::make_shared<Exchanging>(experts_of(world), mode), data_mesh(world));
}

at::Tensor rows() { return here(at::ones({2, kWidth})); }

TEST(ExchangeLabels, AReorderedMicroBatchOfAStepIsNamedOnBothRanks) {
  const auto errors = errors_of(2, [](World& world) {
    auto model = sharded(world, RecomputeMode::kNone);
    StepScope scope(model);  // gathers once: no gather tells the micro-batches apart
    const auto forward = [&](std::int64_t micro_batch) {
      scope.begin_forward(0, micro_batch);
      model.forward(rows());
    };
    forward(7);
    forward(world.rank() == 0 ? 8 : 9);
    forward(world.rank() == 0 ? 9 : 8);
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, ContainsRegex(named({.micro_batch = 8}, {.micro_batch = 9})));
  }
}

// A step scope gives the labels, and they end with it.
TEST(ExchangeLabels, HaveWhatAStepScopeKnows) {
  base::Mutex mutex;
  std::vector<std::string> labels;
  const test_hooks::Set seen(test_hooks::before_issue, [&](int rank, const comm::Batch& batch) {
    if (rank != 0 || batch.label.kind != comm::Kind::kAllToAll) return;
    const base::Lock lock(mutex);
    labels.push_back(concat(comm::to_string(batch.label.activations), " ", batch.label.stage, " ",
                            batch.label.micro_batch));
  });
  ranks(2).run([](World& world) {
    auto model = sharded(world, RecomputeMode::kFull);
    {
      StepScope scope(model, {.stages = 2});
      for (const int stage : {1, 0}) {
        std::map<int, at::Tensor> losses;
        for (const int micro_batch : {0, 1}) {
          scope.begin_forward(stage, micro_batch);
          losses[micro_batch] = squares(model.forward(rows().requires_grad_(true)));
        }
        for (const int micro_batch : {1, 0}) {
          scope.begin_backward(stage, micro_batch, Backward::kFull);
          backward(losses[micro_batch]);
        }
        scope.reshard(stage);
        scope.reduce(stage);
      }
      scope.finish();
    }
    const at::NoGradGuard no_grad;
    model.forward(rows());
  });
  EXPECT_THAT(labels, ElementsAre("forward 1 0", "forward 1 1",      //
                                  "recomputed 1 1", "backward 1 1",  //
                                  "recomputed 1 0", "backward 1 0",  //
                                  "forward 0 0", "forward 0 1",      //
                                  "recomputed 0 1", "backward 0 1",  //
                                  "recomputed 0 0", "backward 0 0", "forward -1 0"));
}

}  // namespace
}  // namespace tessera::test::exchange_labels_test
