// debug.guard: runs in drawn layouts have nothing that differs, and every change of one rank is
// named with its axis, its ranks and the next guarded step.
#include "train/report/guard.h"

#include <random>
#include <sstream>

#include "base/test_hooks.h"
#include "proof.h"
#include "support/test.h"
#include "tessera/shard.h"
#include "train/report/checks.h"
#include "train/trainer.h"
#include "unit/train/drawn_run.h"

namespace tessera::train::guard_test {
namespace {

struct GuardedRun : DrawnRun {
  explicit GuardedRun(const Drawn& d) : DrawnRun(d) {
    config.metrics.trace_steps.clear();
    config.training.steps = 4;
    config.debug.guard = 2;
  }
};

TEST(Guard, FindsNothingInRunsOfDrawnLayouts) {
  for_drawn(test::full_proof() ? 400 : 16, [](const Drawn& d) {
    const GuardedRun run(d);
    EXPECT_NO_THROW(on_ranks(d.ranks(), [&](World& world) { run_training(run.config, world); }));
  });
}

/// Changes an element of one rank after the first step, which the update of the second one does not
/// undo. Its name is returned, with the ranks over `axis`.
struct Damage {
  int rank = 0;
  std::uint32_t seed = 0;
  std::string name = {};

  void operator()(const ShardedBase& model) {
    const auto shards = model.shards();
    std::vector<const ShardView*> trained;
    for (const ShardView& view : shards) {
      if (view.contract->trainable && view.end > view.begin) trained.push_back(&view);
    }
    const ShardView& view = *trained[seed % trained.size()];
    name = view.contract->name;
    const at::NoGradGuard no_grad;
    const at::Tensor values = view.shard.view({-1});
    values[static_cast<std::int64_t>(seed) % values.numel()] += 0.25;
  }
};

TEST(Guard, NamesWhatOneRankChangedItsAxisItsRanksAndTheStep) {
  struct Case {
    std::string axis;
    Drawn run;
  };
  const std::vector<Case> cases{
      {"dp_replicate", {.family = "qwen3", .replicate = 3}},
      {"dp_replicate", {.family = "qwen3-moe", .replicate = 2, .shard = 2, .ep = 2}},
      {"dp_replicate", {.family = "gpt2", .replicate = 2, .tp = 2, .dtype = "bfloat16"}},
      {"dp_replicate", {.family = "llama", .replicate = 2, .pp = 2, .micro_batches = 2}}};
  std::uint32_t seed = 1;
  for (const Case& c : cases) {
    for (int draw = 0; draw < 3; ++draw, ++seed) {
      std::ostringstream words;
      words << "seed " << seed << ": " << c.run;
      SCOPED_TRACE(words.str());
      const GuardedRun run(c.run);
      Damage damage{.rank = static_cast<int>(seed) % c.run.ranks(), .seed = seed * 7919};
      std::string text;
      try {
        on_ranks(c.run.ranks(), [&](World& world) {
          TrainingHooks hooks;
          hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase& model) {
            if (metrics.step == 2 && world.rank() == damage.rank) damage(model);
          };
          run_training(run.config, world, hooks);
        });
        ADD_FAILURE() << "nothing was found of " << damage.name;
      } catch (const FoundProblems& error) {
        text = error.what();
      }
      EXPECT_THAT(text, Says("debug.guard: step 4:", concat("'", damage.name, "' over ", c.axis),
                             concat(damage.rank)));
      if (c.run.replicate == 3) {
        EXPECT_THAT(text, Says(concat("rank ", damage.rank, " has other bits than ranks ")));
      }
    }
  }
}

// Over tp what each rank holds whole is compared, and what is cut is not.
TEST(Guard, OverTpComparesWhatIsWhole) {
  const Drawn d{.family = "qwen3", .tp = 2, .sequence = false};
  for (const std::string name : {"input_layernorm", "q_proj"}) {
    const GuardedRun run(d);
    std::string text;
    try {
      on_ranks(d.ranks(), [&](World& world) {
        TrainingHooks hooks;
        hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase& model) {
          if (metrics.step != 2 || world.rank() != 1) return;
          for (const ShardView& view : model.shards()) {
            if (view.contract->name.find(name) == std::string::npos) continue;
            const at::NoGradGuard no_grad;
            view.shard.add_(0.25);
          }
        };
        run_training(run.config, world, hooks);
      });
    } catch (const FoundProblems& error) {
      text = error.what();
    }
    if (name == "q_proj") {
      EXPECT_EQ(text, "") << "each rank has columns of its own";
    } else {
      EXPECT_THAT(text, Says("step 4:", "input_layernorm.weight' over tp: ", "rank 1 has"));
    }
  }
}

// As on hosts with copies of their own: names and sizes are the same.
TEST(ContextParallelism, RowsThatDifferAmongRanksOfCpAreRefusedWithTheRank) {
  GuardedRun run({.family = "qwen3", .shard = 2, .rows = 1});
  run.config.debug.guard = 0;
  run.config.parallelism.context_parallel_degree = 2;
  std::string text = read_file(run.folder / "page.txt");
  for (char& c : text) c = c == 'p' ? 'q' : c;
  run.folder.write("other/page.txt", text);
  const std::string error = error_of(ErrorKind::kFormat, [&] {
    on_ranks(4, [&](World& world) {
      Config config = run.config;
      if (world.rank() == 3) config.data.path = {(run.folder / "other/page.txt").string()};
      run_training(config, world);
    });
  });
  EXPECT_THAT(error, Says("rows of step 1: found others on rank 3 than on rank 2"));
}

}  // namespace
}  // namespace tessera::train::guard_test
